"""Analyses of a schedule: one file or package each, without MPI or GPU, for a laptop.

    verify       prove a schedule
    simulate     predict the time on a topology
    graphs       the best bandwidth on a graph of links, and an algorithm that reaches it
    draw         a picture, or a page stepping through the rounds
    notebook     a picture in a notebook's cell: `gpucoll.draw`
    document, sizes      common parts of all pages and pictures; numbers of bytes, read and written
"""
