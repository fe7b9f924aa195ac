"""Arrays as the executors need them: accepted and checked, flat, and combined by NumPy.

Nothing here communicates: a call that is refused here has moved and written nothing.
"""

from gpucoll.arrays.accept import (
    Array,
    as_array,
    check_blocks,
    check_input,
    check_output,
    check_rows,
    check_writable,
    same_memory,
)
from gpucoll.arrays.combine import check_op, combiner, fill_identity, finish, premultiplied
from gpucoll.arrays.prepare import NOTHING, Cut, Prepared, Sizes, flat, prepare, prepare_blocks, prepare_scatter

__all__ = ["NOTHING", "Array", "Cut", "Prepared", "Sizes", "as_array", "check_blocks", "check_input", "check_op",
           "check_output", "check_rows", "check_writable", "combiner", "fill_identity", "finish", "flat",
           "premultiplied", "prepare", "prepare_blocks", "prepare_scatter", "same_memory"]
