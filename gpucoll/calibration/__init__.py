"""`gpucoll tune` and `gpucoll explain`: measure this machine for `auto`, and explain the choice of `auto`.

    measure    durations of calls, and links between pairs of ranks; also for the doctor and the benchmark
    packets    a check of the data that the peer kernels bring, before `auto` may choose these kernels
    fit        times of all algorithms at many sizes; alpha, beta, gamma and gap of links
    commands   tune: measure and write the table; explain: candidates, choice, reason
"""
