"""The form of every command's refusal of arguments: one line, and exit code 2."""

import pytest


def refused(capsys, main, words, program="gpucoll"):
    """Return the line printed by `main(words)`, after the name of the program."""
    with pytest.raises(SystemExit) as end:
        main(words)
    output, errors = capsys.readouterr()
    assert (end.value.code, output, errors.count("\n")) == (2, "", 1), errors
    assert errors.startswith(program)
    return errors
