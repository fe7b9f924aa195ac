"""`gpucoll tune` and `gpucoll explain`: measure this machine for `auto`, and explain the choice of `auto`.

    measure    times of all algorithms at many sizes; alpha, beta, gamma and gap of links
    commands   tune: measure and write the table; explain: candidates, choice, reason
"""
