"""Operations under way, and the one loop that waits for them.

    operations  an operation, the handle to it, and the progress thread
    pauses      yields and naps between two looks
    waits       deadline, abort and hooks of a communicator; the order of its operations
"""
