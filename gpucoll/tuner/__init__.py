"""What ``algorithm="auto"`` chooses, and why: the one home of the policy.

    choice       the choice for a call, and what could have been chosen; GPUCOLL_ALGO
    model        what each way is expected to take; pipelining
    table        what was measured of a machine: `gpucoll tune` writes it (see `gpucoll.calibration`)
    explanation  the candidates, the choice and the reason, for people and scripts
"""

from gpucoll.tuner.choice import Choice, Tuner, rules
from gpucoll.tuner.model import segments
from gpucoll.tuner.table import Table, built_in

__all__ = ["Choice", "Table", "Tuner", "built_in", "rules", "segments"]
