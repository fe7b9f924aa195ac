"""Running operations, and the single loop behind every wait.

    operations  an operation, the handle of an asynchronous call, and the progress thread
    waits       deadline, abort and hooks of a communicator, and the order of operations
"""
