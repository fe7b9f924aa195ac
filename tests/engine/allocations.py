"""A program: let every allocation of the engine in a call fail once, one after the other, in each kind of call.

Every rank gets the right result or a typed error. No rank waits until its deadline, and the process survives: if no
rank has an error, the communicator makes a further call. ``python allocations.py KIND`` prints the number of failed
allocations, with `engine/failing.cc` preloaded. Ranks are threads, or the processes of an MPI job.
"""

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy

import gpucoll as gc

RANKS, TIMEOUT, MOST = 2, 60.0, 400
LONG = 1 << 16  # elements, too long for a workspace or a letter
HOOKS = ctypes.CDLL(None)


def values(rank, count):
    return numpy.arange(count, dtype=numpy.float64) + rank


def total(count):
    return sum(values(rank, count) for rank in range(RANKS))


def reduced(comm, count):
    assert (comm.all_reduce(values(comm.rank, count)) == total(count)).all()


def repeated(comm, count):
    for _ in range(3):
        reduced(comm, count)


def placed(comm, count):
    """Symmetric arrays, registered with the engine during a call."""
    x, out = comm.empty(count, "float64"), comm.empty(count, "float64")
    x[:] = values(comm.rank, count)
    comm.all_reduce(x, out)
    assert (out == total(count)).all()


def ragged(comm, count):
    rows = comm.all_gather_v(values(comm.rank, count + comm.rank))
    assert all((row == values(rank, count + rank)).all() for rank, row in enumerate(rows))


def exchanged(comm, count):
    other = 1 - comm.rank
    for _ in range(2):
        out = numpy.zeros(count)
        comm.sendrecv(values(comm.rank, count), out, other, other)
        assert (out == values(other, count)).all()


def unexpected(comm, count):
    """Messages arriving before their receives are posted, received in another order."""
    if comm.rank == 0:
        works = [comm.send(values(tag, count), 1, tag, async_op=True) for tag in range(6)]
        for work in works:
            work.wait()
    else:
        for tag in reversed(range(6)):
            assert (comm.recv(numpy.zeros(count), 0, tag) == values(tag, count)).all()


CALLS = {"reduced": (reduced, 10), "long": (reduced, LONG), "repeated": (repeated, 10),
         "repeated_long": (repeated, LONG), "placed": (placed, LONG), "ragged": (ragged, LONG)}
MESSAGES = {"exchanged": (exchanged, 10), "exchanged_long": (exchanged, LONG), "unexpected": (unexpected, 10),
            "unexpected_long": (unexpected, LONG)}


def made(make, *arguments):
    """Make calls; return the errors raised, of the kinds allowed for a rank."""
    try:
        make(*arguments)
    except (gc.GpucollError, MemoryError) as error:
        return [error]
    return []


def on_threads(make, count, number):
    """Let allocation `number` of all ranks fail; return whether there was such an allocation, and the errors."""
    comms = gc.init_local(RANKS, timeout=TIMEOUT)
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(lambda comm: comm.barrier(), comms))
        HOOKS.fail_after(number)
        errors = [error for some in pool.map(lambda comm: made(make, comm, count), comms) for error in some]
        has_failed = bool(HOOKS.has_failed())
        if not errors:
            list(pool.map(lambda comm: reduced(comm, 7), comms))
    return has_failed, errors + [error for comm in comms for error in made(comm.close)]


def on_processes(make, count, number):
    """Do the same on processes, for one rank in turn."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    comm = gc.Communicator.from_mpi(world, timeout=TIMEOUT)
    comm.barrier()
    world.Barrier()
    if world.rank == number % world.size:
        HOOKS.fail_after(number // world.size)

    def left_by_errors():
        with comm:  # tells the other rank about an error: no rank waits for a message never begun
            make(comm, count)
            has_failed.append(bool(HOOKS.has_failed()))
            reduced(comm, 7)

    has_failed = []
    errors = made(left_by_errors)
    has_failed.append(bool(HOOKS.has_failed()))
    return world.allreduce(any(has_failed), MPI.LOR), errors


def main(kind):
    """Let the first allocation fail, the second and so on, until no allocation is left to fail."""
    attempt, (make, count) = (on_threads, CALLS[kind]) if kind in CALLS else (on_processes, MESSAGES[kind])
    left = RANKS
    for number in range(MOST):
        has_failed, errors = attempt(make, count, number)
        if any(isinstance(error, gc.CollectiveTimeout) for error in errors):
            raise errors[0]
        left = RANKS if has_failed else left - 1
        if not left:  # no rank has so many allocations
            print(f"{number + 1 - RANKS} allocations have failed", flush=True)
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
