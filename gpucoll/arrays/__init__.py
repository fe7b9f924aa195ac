"""Arrays as the executors need them: accepted and checked, flat, and combined by NumPy.

Nothing here communicates: a call that is refused here has moved and written nothing.
"""

from gpucoll.arrays.accept import (
    Array,
    address,
    as_array,
    bounds,
    check_blocks,
    check_input,
    check_output,
    check_rows,
    check_writable,
    is_borrowed,
    module_of,
    on_gpu,
    overlap,
    same_memory,
    stream_of,
)
from gpucoll.arrays.prepare import (
    NOTHING,
    Cut,
    Prepared,
    Sizes,
    Target,
    flat,
    joined,
    kind_of,
    prepare,
    prepare_blocks,
    prepare_scatter,
    target,
)
from gpucoll.arrays.space import HOST, Space, check_op, combiner

__all__ = ["HOST", "NOTHING", "Array", "Cut", "Prepared", "Sizes", "Space", "Target", "address", "as_array", "bounds",
           "check_blocks", "check_input", "check_op", "check_output", "check_rows", "check_writable", "combiner",
           "flat", "is_borrowed", "joined", "kind_of", "module_of", "on_gpu", "overlap", "prepare", "prepare_blocks",
           "prepare_scatter", "same_memory", "stream_of", "target"]
