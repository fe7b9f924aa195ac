"""How ranks that a launcher has started find each other. The launcher `gpucoll run` is in the room `cli`.

    launchers   the environment variables and options of launchers and MPI vendors
    bootstrap   options, MPI's start, the first exchange of all ranks, the end of a job after an error
    places      the address of the store without MPI, from a launcher's variables or the user
    watchdog    the deadline of MPI's start
    regroup     new groups of ranks: survivors, members with newcomers
    descent     tells a child of a rank from a rank
"""

from gpucoll.launch.launchers import rank_variables

__all__ = ["rank_variables"]
