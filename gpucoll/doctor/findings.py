"""Facts by name; a fact that is missing is None and has a reason, and the others do not suffer."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable
from typing import Any

from gpucoll.errors import GpucollError

REMEDIES = {"cupy": "pip install 'gpucoll[cuda13]' or 'gpucoll[cuda12]'", "pynvml": "pip install 'gpucoll[nvml]'",
            "ml_dtypes": "pip install 'gpucoll[dtypes]'", "mpi4py": "pip install mpi4py"}
# Whatever lies in a folder is known by its own name; the system's folders say nothing of who runs this.
_FOLDERS = re.compile(r"(?<![\w.~])/(?!dev/|proc/|sys/)(?:[^\s/:;,'\"()]+/)+")


class Findings:
    """What was looked for: `facts` by name, and in `missing` why those that are None are."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.missing: dict[str, str] = {}

    def look(self, name: str, find: Callable[[], Any]) -> Any:
        """Return what `find` finds and keep it; None where it raises, whatever it raises, and then keep the reason.

        >>> found = Findings()
        >>> found.look("half", lambda: 1 // 2), found.look("nothing", lambda: 1 // 0)
        (0, None)
        >>> found.facts, found.missing
        ({'half': 0, 'nothing': None}, {'nothing': 'integer division or modulo by zero'})
        """
        try:
            self.facts[name] = find()
        except Exception as error:
            self.facts[name] = None
            self.missing[name] = reason(error)
        return self.facts[name]


def reason(error: BaseException) -> str:
    """Return what an exception says, in one line that names neither the user nor the user's folders.

    >>> reason(ModuleNotFoundError(name="ml_dtypes"))
    "ml_dtypes is not installed: pip install 'gpucoll[dtypes]'"
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = REMEDIES.get(error.name.partition(".")[0])
        return f"{error.name} is not installed" + (f": {remedy}" if remedy else "")
    said = error.args[0] if isinstance(error, GpucollError) else str(error)
    return scrubbed(" ".join(str(said).split()) or type(error).__name__)


def scrubbed(text: str) -> str:
    """Return `text` without paths to files, of which the last part stays, and without the user's name.

    >>> scrubbed("cannot open /opt/site/lib/libmpi.so: /dev/shm is full")
    'cannot open libmpi.so: /dev/shm is full'
    """
    home, user = os.path.expanduser("~"), _user()
    if len(home) > 1:
        text = re.sub(re.escape(home) + r"(?=[/\W]|$)", "~", text)
    text = _FOLDERS.sub("", text)
    return re.sub(rf"(?<!\w){re.escape(user)}(?!\w)", "USER", text) if user else text


def _user() -> str:
    """Return the user's name; empty where there is none, or where it is root's, which says nothing."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a number without a name, as in containers
        return ""
    return "" if name == "root" else name
