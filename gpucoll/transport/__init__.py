"""Messages between processes, below the executors.

    tags      the tags of the library's messages, and the limits that MPI sets
    control   messages that end a communicator, in order or not
"""
