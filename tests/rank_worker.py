"""What each rank of the pool in `ranks.py` runs: wait for a program, run it, send its result back, wait again.

Started by mpiexec as `python rank_worker.py SOCKET`. The parent imports this file too, for the framing of messages, so
nothing up here may import mpi4py. Two connections lead to the parent: the *channel* carries orders and answers; the
*bell* carries one byte when a stack dump is complete, and its end says that the parent is gone.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import operator
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import traceback

PROTOCOL = 5
LENGTH = struct.Struct("!Q")
PARENT_GONE = 74


def send_message(channel, payload):
    """The other side can receive exactly these bytes by one `receive_message`."""
    channel.sendall(LENGTH.pack(len(payload)) + payload)


def receive_message(channel):
    """The bytes of one `send_message`; EOFError when the other side is gone."""
    (length,) = LENGTH.unpack(receive_exactly(channel, LENGTH.size))
    return receive_exactly(channel, length)


def receive_exactly(channel, count):
    data = bytearray(count)
    missing = memoryview(data)
    while missing:
        received = channel.recv_into(missing)
        if not received:
            raise EOFError("the other side has closed the connection")
        missing = missing[received:]
    return data


def is_file(module, file):
    """Whether this module or module specification comes from this file."""
    place = getattr(module, "__file__", None) or getattr(module, "origin", None)
    return place is not None and os.path.exists(place) and os.path.samefile(place, file)


def found_by_name(name, file):
    """Whether an import by name would give this file, as it does for packages and in pytest's "prepend" mode."""
    try:
        return is_file(importlib.util.find_spec(name), file)
    except (ImportError, ValueError):
        return False


def load_module(name, file):
    """The module of this name and file, imported at most once, and in `sys.modules` so that pickles can refer to it.

    By name where that finds the file, so that packages and relative imports work; else straight from the file, which is
    what pytest's "importlib" mode does, and what two test files of one name need.
    """
    if is_file(sys.modules.get(name), file):
        return sys.modules[name]
    if name not in sys.modules and found_by_name(name, file):
        return importlib.import_module(name)
    specification = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module must not satisfy the next order
        raise
    return module


@contextlib.contextmanager
def environment(changes):
    """Inside, the environment has these variables (None: does not have it); afterwards it is as before."""
    before = {name: os.environ.get(name) for name in changes}
    set_variables(changes)
    try:
        yield
    finally:
        set_variables(before)


def set_variables(values):
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def communicator_for(world, size, generation, made):
    """A communicator of the first `size` ranks, the same one until `generation` changes.

    A program that failed may have left messages behind. They must meet no later program, so the old communicator is
    dropped and never freed: MPI could give the context of a freed one, with its messages, to the next.
    """
    if made.get(size, (None,))[0] != generation:
        group = world.Get_group().Incl(list(range(size)))
        made[size] = (generation, world.Create_group(group))
    return made[size][1]


def perform(order, world, made):
    """The value of the ordered program on this rank; an order without a program only loads its module."""
    sys.path[:] = [os.path.abspath(place) for place in order["path"]]
    module = load_module(order["module"], order["file"])
    if order["program"] is None:
        return None
    program = operator.attrgetter(order["program"])(module)
    args, kwargs = pickle.loads(order["arguments"])
    communicator = communicator_for(world, order["size"], order["generation"], made)
    with environment(order["environment"]):
        return program(communicator, *args, **kwargs)


def answer(request, world, made):
    """The pickled answer: ("ok", pickled value) or ("error", description). Never raises."""
    try:
        value = perform(pickle.loads(request), world, made)
        return pickle.dumps(("ok", pickle.dumps(value, PROTOCOL)), PROTOCOL)
    except BaseException as error:  # SystemExit too: the worker outlives every program
        return pickle.dumps(("error", describe(error)), PROTOCOL)


def describe(error):
    """What the parent needs to show this exception, and to raise it again where it survives pickling."""
    return {
        "pickled": pickled_if_it_survives(error),
        "type": type(error).__qualname__,
        "text": "".join(traceback.format_exception_only(type(error), error)).strip(),
        "traceback": "".join(traceback.format_exception(type(error), error, program_frames(error))),
    }


def program_frames(error):
    """The traceback of the error from the program on: the frames of this file above it say nothing."""
    frames = error.__traceback__
    while frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def pickled_if_it_survives(error):
    """The pickled exception, or None: some can be pickled but not be made again."""
    try:
        pickled = pickle.dumps(error, PROTOCOL)
        pickle.loads(pickled)
    except Exception:
        return None
    return pickled


def write_output_to(path):
    """All that this process writes to stdout and stderr, C code included, goes to this file, at once."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()


def dump_stacks_on_signal(path, bell):
    """SIGUSR2 writes the stacks of all threads to this file, then a byte to the bell, even inside a blocked MPI call.

    The byte comes from Python's own handler, which faulthandler calls last (`chain`): it is written inside the signal
    handler and waits for no bytecode. Without it nobody could know that a dump is complete. Not SIGUSR1: MPICH's
    launcher sends that to the ranks itself when one of them ends, at the worst of times.
    """
    bell.setblocking(False)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
    dump = open(path, "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.register(signal.SIGUSR2, file=dump, all_threads=True, chain=True)


def end_with_parent(bell, folder):
    """Does not return while the parent lives; then removes its files and ends the process, whatever this waits for."""
    select.select([bell], [], [])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(PARENT_GONE)


def connect(path, kind, world):
    """A connection to the parent, which now knows what it is for and who we are."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    send_message(connection, pickle.dumps((kind, world.rank, world.size, os.getpid())))
    return connection


def serve(channel, world):
    """Returns when the parent sends an empty message: the order to end."""
    made = {}
    while request := receive_message(channel):
        send_message(channel, answer(request, world, made))


def main(path):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    folder = os.path.dirname(path)
    rank_file = os.path.join(folder, f"rank{world.rank}")
    write_output_to(rank_file + ".output")
    channel, bell = connect(path, "channel", world), connect(path, "bell", world)
    dump_stacks_on_signal(rank_file + ".stacks", bell)
    watch = threading.Thread(target=end_with_parent, args=(bell, folder), daemon=True)
    watch.start()
    try:
        serve(channel, world)
    except (EOFError, ConnectionError):
        watch.join()  # it ends the process, without MPI_Finalize: that could wait for ranks that are still busy


if __name__ == "__main__":
    main(sys.argv[1])
