"""`cupy.cuda.memory`."""

from .._memory import (
    Memory,
    MemoryPointer,
    MemoryPool,
    OutOfMemoryError,
    UnownedMemory,
    alloc,
    malloc_managed,
    set_allocator,
    using_allocator,
)

__all__ = ["Memory", "MemoryPointer", "MemoryPool", "OutOfMemoryError", "UnownedMemory", "alloc", "malloc_managed",
           "set_allocator", "using_allocator"]
