"""What ``algorithm="auto"`` chooses, and why: the one home of the policy.

    choice       the choice for a call, and what could have been chosen
    model        what each way is expected to take
    table        what was measured of a machine: `gpucoll tune` writes it (see `gpucoll.calibration`)
    host         where this machine's table lies, and when one is refused
    rules        GPUCOLL_ALGO
    segments     pipelining
    explanation  the candidates, the choice and the reason, for people and scripts
"""

from gpucoll.tuner.choice import Choice, Tuner
from gpucoll.tuner.rules import rules
from gpucoll.tuner.segments import segments
from gpucoll.tuner.table import Table, built_in

__all__ = ["Choice", "Table", "Tuner", "built_in", "rules", "segments"]
