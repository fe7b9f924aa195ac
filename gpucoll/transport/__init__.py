"""Messages between processes, below the executors.

    tags         the tags of the library's messages, and limits set by MPI
    control      messages that end a communicator, normally or after a failure
    rendezvous   the wait for all ranks of an MPI communicator, with a deadline
    connections  authenticated socket connections of ranks to rank 0
    kvstore      the key-value store of ranks without MPI
    mailbox      objects and messages over the store, and messages between threads
    ucx          messages between hosts without MPI
"""
