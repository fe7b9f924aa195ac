"""Runs programs of `gpu_programs` one after the other: on this process's ranks, or on threads that it starts.

    mpiexec -n 2 python runner.py '[["streams", "ring"], ["threads", 3, "points"]]'
"""

import json
import sys

import gpu_programs


def run(name, *arguments):
    if name == "threads":
        gpu_programs.threads(*arguments)
        return
    from mpi4py import MPI

    gpu_programs.on_mpi(MPI.COMM_WORLD, name, *arguments)


def main(text):
    """Zero where all went well; an error of one rank ends all of them, named by its program."""
    for program in json.loads(text):
        try:
            run(*program)
        except BaseException as error:
            error.add_note(f"in {' '.join(map(str, program))}")
            raise


if __name__ == "__main__":
    main(sys.argv[1])
