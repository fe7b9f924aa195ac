"""Benchmarks; installed as `gpucoll.bench`.

    cases          what is measured: tests, sizes, factors
    arguments      the command line, of which `flags` are nccl-tests' and ours
    devices        host, emulated device or GPU: memory and clocks
    data           what every rank puts in and must get out, by the tables of `operands`
    contestants    gpucoll's algorithms, and in `peers` whom they are measured against
    measure        the clock; `overlap` and `pairs` for what is no collective alone
    machine        what the host is, and how fast it copies
    summary        statistics, ratios and their intervals
    findings       slow ranks and slow links, named
    table, osu     what is printed; `progress` while it is not
    records        the JSON file; `document` makes it, `compare` holds two against each other
    interrupt      Ctrl-C
    run            all of it, in turn
    regret         what `auto` chooses against the best that it could have chosen
    plot, report   pictures and a page, drawn by `page`
    readme         README's section, made from the results of scripts/bench
"""
