"""How every command refuses its arguments: one line, and exit code 2."""

import pytest


def refused(capsys, main, words, program="gpucoll"):
    """The line that `main(words)` says, after the name of its program."""
    with pytest.raises(SystemExit) as end:
        main(words)
    output, errors = capsys.readouterr()
    assert (end.value.code, output, errors.count("\n")) == (2, "", 1), errors
    assert errors.startswith(program)
    return errors
