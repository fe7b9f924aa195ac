"""Programs with a fault, as found in other people's programs; a comment `# fault` marks the lines to be named.

`PROGRAMS` has for each the number of ranks, and the kind and the culprits of the finding.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import numpy

import gpucoll as gc
from gpucoll.training import DataParallel


class Program(NamedTuple):
    size: int
    kind: str
    ranks: tuple[int, ...]
    function: Callable[[gc.Communicator], object]

    def lines(self):
        """Return the numbers of the marked lines, as text."""
        source, first = inspect.getsourcelines(self.function)
        return {str(first + number) for number, text in enumerate(source) if "# fault" in text}


PROGRAMS = []


def fault(size, kind, *ranks, among=PROGRAMS):
    """Register a faulty program."""
    def register(function):
        among.append(Program(size, kind, ranks, function))
        return function

    return register


@fault(4, "ended", 3)
def uneven_batches(comm):
    """A rank with fewer batches leaves the loop early: pytorch's most common hang."""
    batches = 3 if comm.rank < 3 else 2
    for _ in range(batches):
        comm.all_reduce(numpy.ones(8))  # fault
    comm.close()


@fault(4, "collective", 0)
def evaluation_on_the_first_rank(comm):
    """The first rank evaluates with a barrier of its own."""
    for step in range(3):
        comm.all_reduce(numpy.ones(8))
        if comm.rank == 0 and step == 1:
            comm.barrier()  # fault
    comm.barrier()


@fault(4, "deadlock", 0, 1)
def groups_in_two_orders(comm):
    """Two groups of the same ranks, used in different orders (pytorch#137006)."""
    first, second = comm.split(0), comm.split(0)
    for group in (first, second) if comm.rank == 0 else (second, first):
        group.all_reduce(numpy.ones(4))  # fault


@fault(4, "group", 2, 3)
def a_group_made_by_its_members_only(comm):
    """Only the members of the new group call `split`, a collective call of all ranks."""
    if comm.rank < 2:
        part = comm.split(0)  # fault
        part.all_reduce(numpy.ones(2))


@fault(3, "collective", 1)
def an_exception_handled_on_one_rank(comm):
    """A rank skips the call of a step after an exception that it handles."""
    for step in range(2):
        try:
            if comm.rank == 1 and step == 0:
                raise ValueError("a corrupt sample")
            comm.all_reduce(numpy.ones(4))  # fault
        except ValueError:
            pass
    comm.barrier()  # fault


@fault(3, "raised", 1)
def an_exception_on_one_rank(comm):
    """A rank dies in the preparation of its data; the others wait."""
    if comm.rank == 1:
        raise FileNotFoundError("shard-00001.npy")  # fault
    comm.all_gather(numpy.ones(2))  # fault


@fault(4, "deadlock", 0, 1, 2, 3)
def a_ring_of_blocking_sends(comm):
    """Every rank sends before it receives: right only as long as messages are buffered."""
    out = numpy.empty(1 << 10)
    comm.send(numpy.ones(1 << 10), (comm.rank + 1) % comm.size)  # fault
    comm.recv(out, (comm.rank - 1) % comm.size)


@fault(2, "unmatched send", 0)
def tags_that_differ(comm):
    """Sender and receiver use different tags; the receiver takes another message first and leaves."""
    if comm.rank == 0:
        comm.send(numpy.ones(3), 1, tag=1)
        comm.send(numpy.ones(3), 1, tag=2)  # fault
    else:
        comm.recv(numpy.empty(3), 0, tag=1)


@fault(3, "unmatched receive", 2)
def a_message_fewer(comm):
    """The root forgets the last rank."""
    if comm.rank == 0:
        for rank in range(1, comm.size - 1):
            comm.send(numpy.ones(3), rank)
    else:
        comm.recv(numpy.empty(3), 0)  # fault


@fault(3, "unmatched send", 1)
def a_send_never_awaited(comm):
    """A message started and forgotten."""
    if comm.rank == 1:
        comm.send(numpy.ones(3), 2, async_op=True)  # fault


@fault(4, "closed", 0, 1, 2, 3)
def a_call_after_close(comm):
    """A hook at the end of the program uses the communicator after `close`."""
    comm.barrier()
    comm.close()
    comm.barrier()  # fault


@fault(2, "mismatch", 1)
def a_parameter_that_one_rank_does_not_use(comm):
    """A model with a layer more on one rank: the buckets of gradients differ."""
    parameters = {"w": numpy.zeros(4, "f4")} | ({"more": numpy.zeros(2, "f4")} if comm.rank else {})
    DataParallel(parameters, comm)  # fault


@fault(3, "refused", 0)
def a_list_in_place_of_an_array(comm):
    """The first rank passes a list."""
    comm.all_reduce([1.0, 2.0] if comm.rank == 0 else numpy.ones(2))  # fault


@fault(4, "counts", 1)
def counts_computed_by_each_rank(comm):
    """The lengths of the blocks are computed, on one rank in another way."""
    counts = [3, 1, 1, 1] if comm.rank == 1 else [2, 2, 1, 1]
    comm.reduce_scatter_v(numpy.ones(6), counts)  # fault


@fault(2, "deadlock", 0, 1)
def a_message_and_a_barrier(comm):
    """A rank waits for a message that the other sends after a barrier."""
    if comm.rank == 0:
        comm.recv(numpy.empty(2), 1)  # fault
        comm.barrier()
    else:
        comm.barrier()  # fault
        comm.send(numpy.ones(2), 0)


@fault(3, "deadlock", 0, 1, 2)
def a_poll_for_a_message_that_nobody_sends(comm):
    """Every rank polls; each would send only after its own message has come."""
    while comm.iprobe((comm.rank + 1) % comm.size) is None:  # fault
        pass
    comm.send(numpy.ones(1), (comm.rank - 1) % comm.size)


@fault(2, "shape", 0)
def a_message_of_another_length(comm):
    """The receiver's array is longer than the message."""
    if comm.rank == 0:
        comm.send(numpy.ones(3), 1)
    else:
        comm.recv(numpy.empty(4), 0)  # fault


@fault(3, "exit", 2)
def an_exit_code_on_one_rank(comm):
    """The last rank ends with an exit code, before the others."""
    if comm.rank == 2:
        raise SystemExit(3)  # fault
    comm.barrier()  # fault
