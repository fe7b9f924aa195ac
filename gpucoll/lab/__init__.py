"""Analyses of a schedule, one file or package each. They need neither MPI nor a GPU, and run on a laptop.

    verify    prove a schedule
    simulate  predict the time on a topology
    graphs    the best bandwidth on a graph of links, and an algorithm that reaches it
    draw      a picture, or a page that steps through the rounds
    notebook  a picture in a cell of a notebook: `gpucoll.draw`
    document  common parts of all pages and pictures
    sizes     numbers of bytes, parsed and printed
"""
