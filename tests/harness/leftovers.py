"""The state left behind by a test in its process: a look before the test, a look after, and the difference.

    before = look()
    ...
    restored(before)        # ["variable NCCL_ALGO: new"]; the state is restored as far as possible

A process runs many tests, so the leftovers of one test cause the failure of a later test. Therefore every test
(`conftest.py`) and every program on the pool (`rank_worker.py`) must leave its process unchanged.

Descriptors, threads, child processes and communicators have owners. Only the owners can close them safely, so these
leftovers are only reported. Everything else is restored.
"""

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from gpucoll.transport.process import PROCESS
from gpucoll.transport.rendezvous import becomes
from harness.pace import Patience

GRACE = 2.0  # seconds for threads and children already asked to end
# Tables of the library kept for the life of a process.
CACHES = {
    "gpucoll.communicator._world", "gpucoll.algorithms._PHASES", "gpucoll.device.cuda._functions",
    "gpucoll.device.nvrtc._libraries", "gpucoll.health.processes._descriptors",
    "gpucoll.device.gpus._given", "gpucoll.device.nccl._dropped",
}
MACHINE = "gpucoll.emulation._faces."  # its memory and handles live as long as the process, as those of a GPU's driver
REGISTRY = "gpucoll.algorithms._REGISTRY"
USERS = {REGISTRY: {}, "gpucoll.algorithms._USED": set(), "gpucoll.msccl._REGISTERED": {}}  # empty before the import
# The thread of a communicator (an open communicator is reported itself), and the emulated GPU for the whole process.
LASTING = ("gpucoll progress", "emulated GPU")
# Ends of the names of files open for good reasons: Python and Matplotlib keep files from the first use on; a failed
# communicator keeps its memory while an array or another rank may use the memory, until collected.
KEPT = ("/dev/urandom", ".ttf", "/memfd:gpucoll (deleted)", "/memfd:emulated (deleted)")
lasting: "set[tuple[str, int]]" = set()  # descriptors and children of the session: those of a pool's job


class Kind(NamedTuple):
    """One kind of state: `look` returns the state by name; `put` restores such a state."""

    look: Callable[[], "dict[Any, Any]"]
    put: "Callable[[dict[Any, Any], dict[Any, Any]], None] | None"  # before, now; None: only the owner can restore


def put_back(container: Any) -> "Callable[[dict[Any, Any], dict[Any, Any]], None]":
    """Return a function restoring a mapping from an earlier copy; at no moment are entries missing."""
    def put(before, now):
        for name in now.keys() - before.keys():
            container.pop(name, None)  # two modules may name one table
        container.update(before)
    return put


def variables():
    """Return the environment, without the name of the running test, and without variables that are set for good.

    Ranks and emulated GPUs mark the environment of their descendants; scikit-learn sets variables of its libraries.
    """
    return {name: value for name, value in os.environ.items()
            if name not in ("PYTEST_CURRENT_TEST", "_GPUCOLL_PROCESS", "EMULATED_BUS") and not name.startswith("KMP_")}


def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this look itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    guard = sys.modules.get("gpucoll.health.processes")
    watched = guard._descriptors.values() if guard else ()  # handles of other ranks, kept for all communicators
    return {number: target for number, target in found.items()
            if ("descriptor", number) not in lasting and number not in watched and not target.endswith(KEPT)}


def children():
    """Return the child processes by id, including zombies: their parent forgot to wait."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found |= {int(one): "alive or not waited for" for one in file.read().split()}
    return {number: state for number, state in found.items() if ("child", number) not in lasting}


def handlers():
    """Return the handlers of all signals, except pytest-timeout's: it comes and goes with its timers."""
    return {number.name: signal.getsignal(number) for number in signal.Signals if number != signal.SIGALRM}


def put_handlers(before, now):
    for name, handler in before.items():
        if handler is not now[name] and handler is not None:  # None: set by C code; only C code can restore it
            signal.signal(signal.Signals[name], handler)


FILTERS = "the filters of warnings"
INTERPRETER = {
    "the current folder": (os.getcwd, os.chdir),
    "sys.path": (lambda: [*sys.path], lambda value: sys.path.__setitem__(slice(None), value)),
    FILTERS: (lambda: [*warnings.filters], lambda value: put_filters(value)),
    "sys.excepthook": (lambda: foreign(sys.excepthook, sys.__excepthook__),
                       lambda value: setattr(sys, "excepthook", value)),
    "threading.excepthook": (lambda: foreign(threading.excepthook, threading.__excepthook__),
                             lambda value: setattr(threading, "excepthook", value)),
}


def foreign(hook, default):
    """Return the hook, or Python's default instead of the library's own hook, kept on purpose for the whole process."""
    return default if getattr(hook, "__module__", "") == "gpucoll.launch.bootstrap" else hook


def put_filters(value):
    warnings.filters[:] = value  # type: ignore[index]
    warnings.filterwarnings("ignore", message="no such warning")  # a change, to refresh the caches of warnings
    del warnings.filters[0]  # type: ignore[attr-defined]


def interpreter():
    return {name: get() for name, (get, _) in INTERPRETER.items()}


def put_interpreter(before, now):
    for name, value in before.items():
        if now[name] != value:
            INTERPRETER[name][1](value)


def loaded():
    """Return the loaded modules of the library, by name."""
    return {name: module for name, module in [*sys.modules.items()] if name.partition(".")[0] == "gpucoll"
            and not name.startswith(MACHINE) and isinstance(module, types.ModuleType)}


@functools.lru_cache(maxsize=1)
def containers(count):
    """Return the tables of the library's modules, by full name."""
    return {f"{name}.{inner}": value for name, module in loaded().items() for inner, value in vars(module).items()
            if type(value) in (dict, list, set) and not inner.startswith("__") and f"{name}.{inner}" not in CACHES} \
        | {f"PROCESS.{name}": vars(PROCESS)[name] for name in ("ports", "stores")}


def tables():
    """Return a copy of every table. Of the registry only users' algorithms: the library's are loaded at first use."""
    found = USERS | {name: value.copy() for name, value in containers(len(sys.modules)).items()}
    return found | {REGISTRY: {key: one for key, one in found[REGISTRY].items() if one.own}}


def put_tables(before, now):
    before = USERS | before
    for name, table in containers(len(sys.modules)).items():
        if name in before and now[name] != before[name]:
            value = before[name]
            if isinstance(table, list):
                table[:] = value
            elif isinstance(table, set):
                table.intersection_update(value)
                table.update(value)
            else:
                put_back(table)(value, now[name])
    algorithms = sys.modules.get("gpucoll.algorithms")
    if algorithms is not None:
        algorithms.registry.cache_clear()


def files():
    """Return the modules created from users' files by `gpucoll.load`."""
    return {name: module for name, module in sys.modules.items() if name.startswith("gpucoll_file_")}


def communicators():
    """Return the open communicators. A failed communicator is left to the collector, with its progress thread."""
    lifecycle = sys.modules.get("gpucoll.communicator.lifecycle")
    alive = [*lifecycle._alive] if lifecycle else []
    return {id(one): "not closed" for one in alive
            if not (one.closed or one.link.has_ended()) and one.waits.failure is None}


def threads():
    return {one.ident: one.name for one in threading.enumerate() if one.name not in LASTING}


KINDS = {
    "variable": Kind(variables, put_back(os.environ)),
    "state": Kind(interpreter, put_interpreter),
    "signal handler": Kind(handlers, put_handlers),
    "table": Kind(tables, put_tables),
    "module": Kind(files, put_back(sys.modules)),
    "communicator": Kind(communicators, None),
    "thread": Kind(threads, None),
    "child": Kind(children, None),
    "descriptor": Kind(descriptors, None),
}


def look():
    """Return the state of this process."""
    return {kind: row.look() for kind, row in KINDS.items()}


def restored(before):
    """Restore the state as far as possible; return a line for every difference from `before`."""
    now, lines = look(), []
    if any(new_ones(before, now, kind) for kind, row in KINDS.items() if row.put is None):
        now = settled(before)
    for kind, row in KINDS.items():
        found = [*differences(kind, before[kind], now[kind])]
        lines += [f"{kind} {line}" for line in found]
        if found and row.put:
            row.put(before[kind], now[kind])
    return lines


@contextlib.contextmanager
def without_algorithms():
    """Remove, at the end, the algorithms registered inside and the modules of their files."""
    before = {kind: KINDS[kind].look() for kind in ("table", "module")}
    try:
        yield
    finally:
        for kind, held in before.items():
            KINDS[kind].put(held, KINDS[kind].look())


def settled(before):
    """Return the state after collecting garbage, and giving threads, children and running calls time to end.

    A communicator dropped in an asynchronous call is kept by its progress thread until the end of the call.
    """
    patience = Patience(GRACE)
    becomes(lambda: gc.collect() >= 0 and not communicators().keys() - before["communicator"].keys(), patience.left())
    while (left := patience.left()) and (found := new_threads(before)):
        for one in found:
            one.join(min(left, 0.1))
    return look()


@contextlib.contextmanager
def modules_in_place(**modules):
    """Inside, `import` finds these modules by their names.

    Other modules imported inside stay imported. `mock.patch.dict(sys.modules)` would remove them. A later import would
    then create them again, and the process would have two versions of a module.
    """
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def new_threads(before):
    """Return the threads started since `before`."""
    return [one for one in threading.enumerate() if one.ident not in before["thread"] and one.name not in LASTING]


def new_ones(before, now, kind):
    return now[kind].keys() - before[kind].keys()


def differences(kind, before, now):
    """Yield a description of each difference in one kind of state."""
    if kind == "table":
        for name in before.keys() & now.keys():
            if before[name] != now[name]:
                yield f"{name}: {change(before[name], now[name])}"
    elif KINDS[kind].put is None:
        yield from (f"{name}: {now[name]}" for name in now.keys() - before.keys())
    else:
        for name in sorted(before.keys() | now.keys()):
            if name not in before:
                yield f"{name}: new"
            elif name not in now:
                yield f"{name}: removed"
            elif before[name] is not now[name] and before[name] != now[name]:
                yield f"{name}: {before[name]!r} has become {now[name]!r}"


def change(before, now):
    """Return a few words about new, removed and changed entries."""
    if isinstance(before, list):
        return f"{len(before)} elements have become {len(now)}"
    came, went = [*(now.keys() - before.keys())] if isinstance(now, dict) else [*(now - before)], \
        [*(before.keys() - now.keys())] if isinstance(before, dict) else [*(before - now)]
    words = [f"{word} {', '.join(map(repr, some))}" for word, some in (("new", came), ("removed", went)) if some]
    return "; ".join(words) or "other values"
