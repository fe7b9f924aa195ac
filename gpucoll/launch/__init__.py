"""How ranks start and meet.

    launchers   what the launchers tell their ranks
    bootstrap   options, MPI's start, the world of all ranks, the end of a job
    watchdog    the deadline of MPI's start
    standalone  ranks of one host without MPI
    jobs        `gpucoll run`
    arguments   command lines that all ranks read alike
"""

from gpucoll.launch.launchers import rank_variables

__all__ = ["rank_variables"]
