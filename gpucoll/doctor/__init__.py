"""`gpucoll doctor`: is this machine, and this job, fit for collectives? Facts, tests, and what to do, in plain words.

    run         the order of it all: what each rank finds, what rank 0 makes of it
    findings    facts by name, and for each that is missing the reason
    mpi         which MPI and which launcher, and whether they match; before MPI is started
    versions    of the packages and libraries
    machine     cores, memory, limits, clock of this process and its host
    gpus        NVML's view of the GPUs: PCI ids, memory, NVLinks, who reaches whom
    links       messages between all pairs of ranks; verdicts: which links are slow
    selftest    every collective on small exact data
    rules       what is wrong, and advice; from the report alone
    text        the report for people
"""

from gpucoll.doctor.run import main

__all__ = ["main"]
