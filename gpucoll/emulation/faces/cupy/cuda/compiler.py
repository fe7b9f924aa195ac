"""`cupy.cuda.compiler`: the exception of a source that the compiler rejects."""

from .._source import CompileException

__all__ = ["CompileException"]
