"""Programs that equal ranks cannot share: changes outside of the process, or values that differ between ranks.

`REASONS` has for each program a part of the reason against a proof. Files would be written into `folder`.
"""

import _thread
import ctypes
import importlib
import mmap
import os
import pathlib
import random
import secrets
import socket
import subprocess
import sys
import threading
import uuid

import numpy

folder = ""


def a_file(comm):
    with open(pathlib.Path(folder) / "written", "w") as file:
        file.write("a")


def a_folder(comm):
    os.mkdir(os.path.join(folder, "folder"))


def a_lower_file(comm):
    os.open(os.path.join(folder, "low"), os.O_CREAT | os.O_RDWR)


def a_process(comm):
    subprocess.run([sys.executable, "-c", "pass"], check=True)


def a_fork(comm):
    if os.fork() == 0:
        os._exit(0)


def a_socket(comm):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))


def a_thread(comm):
    threading.Thread(target=print).start()


def a_lower_thread(comm):
    _thread.start_new_thread(print, ())


def pytorch(comm):
    import torch  # noqa: F401


def random_numbers(comm):
    random.random()
    comm.barrier()


def random_numbers_of_numpy(comm):
    numpy.random.rand()
    comm.barrier()


def random_numbers_before_a_seed(comm):
    random.random()
    random.seed(5)


def a_seed_of_the_system(comm):
    random.seed(5)
    random.seed()
    random.random()
    comm.barrier()


def a_generator_without_a_seed(comm):
    numpy.random.default_rng()


def a_secret(comm):
    secrets.token_hex(4)


def a_unique_name(comm):
    uuid.uuid4()


def a_generator_of_its_own(comm):
    random.Random().random()


def numbers_of_single_ranks(comm):
    comm.all_reduce(numpy.full(3, comm.rank))
    comm.all_reduce(numpy.ones(numpy.random.randint(1, 1 << 20)))


def numbers_of_a_device(comm):
    pathlib.Path("/dev/urandom").read_bytes()


def a_type_of_some_ranks(comm):
    if isinstance(2 ** (comm.rank - 1), float):
        comm.barrier()


def shared_memory(comm):
    mmap.mmap(-1, 100)


def standard_input(comm):
    sys.stdin.read()


def a_part_of_pytorch(comm):
    importlib.import_module("torch.nn")


def a_file_written_in_c(comm):
    system = ctypes.CDLL(None)
    file = system.open(__file__.encode(), os.O_WRONLY | os.O_APPEND)
    system.write(file, b"#" * 100, 100)


def a_message(comm):
    comm.send(numpy.ones(1), 0) if comm.rank else comm.recv(numpy.ones(1), 1)


def an_exit(comm):
    sys.exit(3)


REASONS = {
    a_file: "written", a_folder: "os.mkdir", a_lower_file: "low", a_process: "", a_fork: "os.fork",
    a_socket: "socket.bind", a_thread: "a thread", pytorch: "import torch", random_numbers: "python without a seed",
    random_numbers_of_numpy: "numpy without a seed", random_numbers_before_a_seed: "python without a seed",
    a_seed_of_the_system: "python without a seed", a_generator_without_a_seed: "of the system",
    a_generator_of_its_own: "of the system", numbers_of_single_ranks: "calls differ", numbers_of_a_device: "urandom",
    a_lower_thread: "_thread.start_new_thread", a_type_of_some_ranks: "calls differ",
    shared_memory: "shared by processes", standard_input: "standard input", a_part_of_pytorch: "torch",
    a_file_written_in_c: "ended early",
    a_secret: "of the system", a_unique_name: "of the system", a_message: "message", an_exit: "SystemExit"}
