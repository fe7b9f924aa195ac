"""Failure detection: dead or stopped ranks, different calls, stuck GPU streams; and records for the time after a crash.

    processes    watches the processes of the ranks on this host
    remote       watches the ranks on other hosts, by the connections of all ranks to a store
    farewell     the last message of a rank to the others, with the reason
    devices      a watchdog for calls on GPUs, where no host thread waits
    flight       the record of calls: own delay, waiting and moving, summed for `stats`; the last calls of a rank in a
                 mapped file that survives SIGKILL
    clocks       the offsets of hosts' clocks, for the flight recorder
    report       `gpucoll report DIR`: compares the files of all ranks; `--stragglers`: the rank that delays the others
    device_shares  the shares of calls on a GPU, from events
    metrics      the record for Prometheus, GPUCOLL_METRICS, and its report at the end of a process, GPUCOLL_SUMMARY
    guard        the hook of every wait: raises an error when an awaited rank has died or aborted
    preflight    compares the ranks' calls, before data is sent or deferred to the next call
    observed     calls wrapped with the recorder, the log and faults for tests
    termination  callbacks that run at SIGTERM
"""
