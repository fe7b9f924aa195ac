"""`gpucoll tune` and `gpucoll explain`: measure this machine for `auto`, and tell what it chooses.

    meter      the call of a collective, for a number of bytes; seconds of several calls in turn; the sweep of all
    probes     what is measured for each executor and class of links; alpha, beta, gamma and gap out of that
    commands   tune: measures, writes the table; explain: candidates, choice, reason
"""
