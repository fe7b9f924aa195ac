"""What the compilers of this layer share: the error of a source that one of them refuses."""

from __future__ import annotations

import re

from gpucoll.errors import BackendError

SOURCE_NAME = "kernels.cu"  # what compilers call a source that has no file
# NVRTC: `reduce.cu(12): error: ...`; g++: `reduce.cu:12:7: error: ...`; assemblers and linkers: often without a place.
_ERROR = re.compile(r"^(?:(?P<file>[^\s(:]+)[(:](?P<row>\d+)\S*: )?(?:.*?[ ;])?"
                    r"(?:error|Error|fatal)(?: #\S+?)? *: *(?P<text>.+)$", re.MULTILINE)


class CompileError(BackendError):
    """A compiler refused the source: `log` is all that it said, `line` the text of its first error without the place.

    >>> error = CompileError.of("g++", "src/kernels.cu:3:9: error: 'x' was not declared in this scope")
    >>> print(error)
    [GC-COMPILE] g++ at kernels.cu:3: 'x' was not declared in this scope
    >>> error.line
    "'x' was not declared in this scope"
    """

    default_code = "GC-COMPILE"
    log = ""
    line = ""

    @classmethod
    def of(cls, compiler: str, log: str) -> CompileError:
        """Return the error of `compiler`, whose report was `log`."""
        place, line = first_error(log)
        error = cls(f"{compiler}{place}: {line}")
        error.log, error.line = log, line
        return error

    def __reduce__(self) -> tuple[object, ...]:
        return (*super().__reduce__(), {"log": self.log, "line": self.line})


def first_error(log: str) -> tuple[str, str]:
    """Return the place of the first error in `log`, as the end of a sentence's subject, and its text.

    >>> first_error('src/reduce.cu(12): error: identifier "x" is undefined')
    (' at reduce.cu:12', 'identifier "x" is undefined')
    >>> first_error("killed")
    ('', 'killed')
    """
    match = _ERROR.search(log)
    if match is None:
        return "", next((line.strip() for line in log.splitlines() if line.strip()), "it failed and did not say why")
    place = f" at {match['file'].rpartition('/')[2]}:{match['row']}" if match["row"] else ""
    return place, match["text"]
