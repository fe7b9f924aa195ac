"""The process of each rank of the pool in `ranks.py`: wait for a program, run it, send back the result, repeat.

Started by mpiexec as `python rank_worker.py SOCKET`. Two connections lead to the parent. The *channel* carries orders
and answers. The *bell* carries a byte after each complete stack dump; the end of the bell means the parent is gone.
"""

import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import operator
import os
import pickle
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Client
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # the rooms of the tests, instead of this room

from harness import leftovers  # noqa: E402 (the path comes first)


def load_module(name, file):
    """Return a module: imported by name if possible, else from its file, as in pytest's "importlib" mode."""
    if name not in sys.modules:
        try:
            importlib.import_module(name)
        except ImportError:
            specification = importlib.util.spec_from_file_location(name, file)
            sys.modules[name] = module = importlib.util.module_from_spec(specification)
            try:
                specification.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]  # half a module must not satisfy the next order
                raise
    return sys.modules[name]


@contextlib.contextmanager
def variables(values):
    """Set these environment variables inside; None removes a variable."""
    before = dict(os.environ)
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in values if name in before})


class Copies:
    """Counts the copies of the communicators given to programs: every copy takes one of MPI's contexts.

    MPICH has 2048 contexts. A failed communicator of gpucoll keeps its copies: MPI could reuse their contexts, with
    messages still under way, for the next communicator.
    """

    def __init__(self):
        self.count, self.key = 0, None

    def watch(self, communicator):
        """Count `communicator`, and its copies from now on."""
        if self.key is None:
            self.key = type(communicator).Create_keyval(copy_fn=self.made, delete_fn=self.freed)
        communicator.Set_attr(self.key, self)
        self.count += 1

    def made(self, communicator, key, value):
        self.count += 1
        return value

    def freed(self, communicator, key, value):
        self.count -= 1


copies = Copies()


def communicator_for(world, size, generation, made):
    """Return a communicator of the first `size` ranks, the same object until `generation` changes.

    A failed program may have left messages behind, and no later program may receive these. So the old communicator is
    dropped without freeing: MPI could reuse the context of a freed communicator, with its messages, for the next.
    """
    if made.get(size, (None,))[0] != generation:
        made[size] = generation, world.Create_group(world.Get_group().Incl(list(range(size))))
        copies.watch(made[size][1])
    return made[size][1]


@functools.cache
def open_door():
    """Open and serve this process' join port: a rank that has failed keeps it for the life of the process."""
    from gpucoll.transport.ports import port

    port("", 1).serve()


def perform(order, world, made):
    """Run a program; return its pickled result, and a line for each leftover in this process."""
    sys.path[:] = [os.path.abspath(place) for place in order["path"]]
    program = operator.attrgetter(order["program"])(load_module(order["module"], order["file"]))
    args, kwargs = pickle.loads(order["arguments"])
    communicator = communicator_for(world, order["size"], order["generation"], made)
    open_door()
    before = leftovers.look()
    try:
        with variables(order["environment"]):
            answer = pickle.dumps(program(communicator, *args, **kwargs))
    finally:  # after an exception the error is reported instead
        left = leftovers.restored(before)
    return answer, left


def portable(error):
    """Return the pickled exception, or a RuntimeError instead, and its traceback from the program's first frame on."""
    frames = error.__traceback__
    while frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    kind = type(error)
    text = "".join(traceback.format_exception(kind, error, frames))
    for found in (error, RuntimeError(f"{kind.__qualname__}: {error}")):
        with contextlib.suppress(Exception):  # some exceptions can be pickled, but not unpickled
            pickled = pickle.dumps((found, text))
            pickle.loads(pickled)
            break
    return pickled


def serve(channel, world):
    """Answer each order by ("ok", pickled value, leftovers) or ("error", result of `portable`, ()), and two numbers.

    The numbers are the processor seconds since the last answer, and the number of communicators. An empty order ends
    the loop.
    """
    made, used = {}, time.process_time()
    while order := channel.recv_bytes():
        try:
            answer = "ok", *perform(pickle.loads(order), world, made)
        except BaseException as error:  # SystemExit too: the worker outlives every program
            answer = "error", portable(error), ()
        used, before = time.process_time(), used
        channel.send((*answer, used - before, copies.count))


def dump_stacks_on_signal(path, bell):
    """Let SIGUSR2 write the stacks of all threads to this file, then a byte to the bell, even in a blocked MPI call.

    The byte comes from Python's own signal handler. faulthandler calls this handler last (`chain`), and the handler
    waits for no bytecode. Not SIGUSR1: MPICH's launcher sends SIGUSR1 to the ranks when a rank ends.
    """
    os.set_blocking(bell.fileno(), False)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
    dump = open(path, "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.register(signal.SIGUSR2, file=dump, all_threads=True, chain=True)


def end_with_parent(bell, folder):
    """Wait for the end of the parent; then remove its files and end the process, even if the main thread is blocked."""
    select.select([bell], [], [])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(74)


def main(path):
    from mpi4py import MPI

    world, folder = MPI.COMM_WORLD, os.path.dirname(path)
    rank_file = os.path.join(folder, f"rank{world.rank}")
    output = os.open(rank_file + ".output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)  # so that the file gets output of C code, too, at once
    os.dup2(output, 2)
    faulthandler.enable()
    channel, bell = Client(path), Client(path)
    channel.send((world.rank, "channel", world.size, os.getpid()))
    bell.send((world.rank, "bell", world.size, os.getpid()))
    dump_stacks_on_signal(rank_file + ".stacks", bell)
    watch = threading.Thread(target=end_with_parent, args=(bell, folder), daemon=True)
    watch.start()
    try:
        serve(channel, world)
    except (EOFError, ConnectionError):
        watch.join()  # ends the process without MPI_Finalize, which could wait for busy ranks


if __name__ == "__main__":
    main(sys.argv[1])
