"""`gpucoll tune` and `gpucoll explain`: measure this machine for `auto`, and tell what it chooses.

    operands   the arrays and the call of a collective, for a number of bytes
    meter      seconds of several calls in turn
    fit        alpha, beta, gamma and gap out of measured times
    probes     what is measured for a fit, for each executor and class of links
    sweep      every algorithm at many sizes
    tune       the command: measures, writes the table
    explain    the command: candidates, choice, reason
"""
