"""`gpucoll tune` and `gpucoll explain`: measure this machine for `auto`, and tell what it chooses.

    measure    seconds of calls; those of every algorithm at many sizes; alpha, beta, gamma and gap of links
    commands   tune: measures, writes the table; explain: candidates, choice, reason
"""
