"""The start of ranks, and how they meet.

    launchers   the environment variables and options of launchers and MPI vendors
    bootstrap   options, MPI's start, the meeting of all ranks, the end of a job after an error
    places      where ranks meet without MPI: a store's place, from a launcher's variables or the user
    watchdog    the deadline of MPI's start
    standalone  the ranks of one host of a job without MPI, started and watched
    jobs        `gpucoll run`
    arguments   command lines under mpiexec: errors and help printed once
"""

from gpucoll.launch.launchers import rank_variables

__all__ = ["rank_variables"]
