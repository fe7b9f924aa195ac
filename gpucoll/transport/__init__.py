"""Messages between processes, below the executors.

    tags         the tags of the library's messages, and limits set by MPI
    control      messages that end a communicator, normally or after a failure
    process      what this process keeps for all communicators, its end, and a fork's child
    rendezvous   the wait for all ranks of an MPI communicator, with a deadline
    connections  authenticated socket connections, and the groups of processes at one end
    kvstore      the key-value store of ranks without MPI
    ports        where processes apply for a place in a new communicator
    mailbox      objects and messages over the store, and messages between threads
    ucx          messages between hosts without MPI
"""
