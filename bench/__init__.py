"""Benchmarks; installed as `gpucoll.bench`.

    arguments      the command line; `cases`, what is measured: tests, sizes, factors
    devices        host, emulated device or GPU: memory and clocks
    data           what every rank puts in and must get out, by the tables of `operands`
    contestants    gpucoll's algorithms, and the peers that they are measured against
    measure        the clock; `overlap` for what is no collective alone, `machine` for the host and its copy bandwidth
    summary        statistics, ratios and their intervals, two runs held against each other
    records        the JSON file; `table`, what is printed
    run            all of it, in turn, and its record; `interrupt`, Ctrl-C
    training       steps of `gpucoll.training`; `torch_ddp` and `torch_backend` against PyTorch,
                   `servers` against a ring
    neighbours     short calls while other processes compute, against MPI's
    regret         what `auto` chooses against the best that it could have chosen
    report, plot   a page and pictures of what `curves` finds in records; `figures` and `tables` are the page's
    strategies     what each strategy of training sends and keeps, beside its formula; `steps`, a step of each
    readme         docs/performance.md's tables, made from the results of scripts/bench
"""
