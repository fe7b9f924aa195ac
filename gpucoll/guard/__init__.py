"""What tells ranks of each other: who has died or stopped, what each was doing, and what is left to read after a crash.

    processes    the processes of a node's ranks, watched
    flight       what each rank has called, in a file that outlives it
    report       `gpucoll report DIR`: the files of all ranks side by side
    faults       faults for tests, by GPUCOLL_FAULT
"""
