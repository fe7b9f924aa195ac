"""Benchmarks; installed as `gpucoll.bench`.

    arguments      the command line; `cases`: tests, sizes and bandwidth factors
    devices        host, emulated device or GPU: memory and clocks
    data           inputs and expected results of every rank, from the tables of `operands`
    contestants    gpucoll's algorithms, and the libraries compared with gpucoll (peers)
    measure        the timing; `machine`: the host and its copy bandwidth
    summary        statistics, ratios and confidence intervals, comparison of two runs
    records        the JSON file; `table`: the printed lines
    run            a whole run and its record; `interrupt`: Ctrl-C
    training       steps of `gpucoll.training`; `torch_ddp` and `torch_backend`: comparison with PyTorch,
                   `servers`: comparison with a ring
    report, plot   a page and pictures of the `curves` in records; `figures` and `tables` of the page
    strategies     bytes sent and kept by each strategy of training, beside the formulas; `steps`: a step of each
    readme         the tables of docs/performance.md, from the results of scripts/bench
"""
