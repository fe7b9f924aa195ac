"""The start of ranks, and how they find each other.

    launchers   the environment variables and options of launchers and MPI vendors
    bootstrap   options, MPI's start, the first exchange of all ranks, the end of a job after an error
    places      the address of the store without MPI, from a launcher's variables or the user
    watchdog    the deadline of MPI's start
    standalone  starts and watches the ranks of one host in a job without MPI
    jobs        `gpucoll run`
    mpi_jobs    starts and watches mpiexec, and keeps each rank's exit code
    descent     tells a child of a rank from a rank
    ctrl_c      the end of a command by Ctrl-C
    arguments   command lines under mpiexec: one rank prints errors and help
"""

from gpucoll.launch.launchers import rank_variables

__all__ = ["rank_variables"]
