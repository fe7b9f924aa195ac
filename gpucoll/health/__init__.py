"""What tells ranks of each other: who has died or stopped, what each was doing, and what is left to read after a crash.

    processes    the processes of a node's ranks, watched
    remote       the same of ranks on other hosts, by connections
    devices      a watchdog for calls on GPUs, which no thread of the host waits for
    flight       what each rank has called, in a file that outlives it
    report       `gpucoll report DIR`: the files of all ranks side by side
    guard        the hook of a communicator's waits that looks after all that
    preflight    calls of ranks that only send messages, compared before data move
    observed     executors with the recorder, the log and faults for tests around them
    termination  what is done at SIGTERM
"""
