"""The policy of ``algorithm="auto"``: the choice of algorithm and executor for each call, and the reasons.

    choice       the candidates for a call, and the choice among them; GPUCOLL_ALGO
    model        the predicted time of each candidate; pipelining
    table        the measurements of a machine, written by `gpucoll tune` (see `gpucoll.calibration`)
    explanation  the candidates, the choice and the reason, for people and scripts
"""

from gpucoll.algorithms import segments
from gpucoll.tuner.choice import Choice, Tuner, rules
from gpucoll.tuner.table import Table, built_in

