"""Ways of looking at a schedule: one file or package each, pure, for a laptop.

    verify       prove it
    simulate     how long it takes on a topology
    draw         a picture, or a page that steps through it
    notebook     a picture in a notebook's cell: `gpucoll.draw`
    document, sizes      what all pages and pictures have in common; numbers of bytes, read and written
"""
