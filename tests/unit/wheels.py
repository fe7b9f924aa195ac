"""Check our calls of the real CuPy and NCCL without a GPU; run by the Python of an environment with both.

    python tests/unit/wheels.py            # prints a JSON object: the checked items, and the errors
"""

import ast
import contextlib
import ctypes
import importlib
import inspect
import json
import os
import re
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FACES = ROOT / "gpucoll" / "emulation" / "_faces"
USERS = ("gpucoll/**/*.py", "scripts/*.py", "bench/*.py", "tests/gpu/*.py")


def dotted(node):
    """Return the words of `a.b.c`; None for any other expression."""
    words = []
    while isinstance(node, ast.Attribute):
        words.insert(0, node.attr)
        node = node.value
    return [node.id, *words] if isinstance(node, ast.Name) else None


def names_of(path):
    """Yield (line, full name, call) for each name of CuPy used by a file; `call` is None without a call."""
    tree = ast.parse(path.read_text())
    known = {"cupy": ["cupy"]}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cupy":
            known |= {one.asname or one.name: [*node.module.split("."), one.name] for one in node.names}
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and dotted(node.value):
            first, *more = dotted(node.value)
            if first in known:
                known[node.targets[0].id] = [*known[first], *more]
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        words = dotted(node)
        name = [*known[words[0]], *words[1:]] if words and words[0] in known else ()
        if len(name) > 1 and not any(word.startswith("_") or word == "hostile" for word in name):  # of the emulation
            yield node.lineno, name, calls.get(id(node))


def resolved(words):
    """Return the object of a full name; raise AttributeError if there is none."""
    found = importlib.import_module("cupy")
    for number, word in enumerate(words[1:], 2):
        try:
            found = getattr(found, word)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(words[:number]))
            except ImportError:
                raise AttributeError(".".join(words[:number])) from None
    return found


def parameters(function):
    """Return (name, has a default, keyword only) of each parameter; None if unknown or variadic."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return embedded(function)
    kinds = {one.kind for one in found}
    many = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} & kinds
    return None if many else [(one.name, one.default is not one.empty, one.kind is one.KEYWORD_ONLY) for one in found]


def embedded(function):
    """Return the same from the first line of Cython's documentation: `send(self, intptr_t sendbuf, ...)`."""
    line = (function.__doc__ or "").strip().partition("\n")[0]
    match = re.match(r"[\w.]+\((.*)\)", line)
    if match is None or "*args" in line:
        return None
    found, only = [], False
    for part in filter(None, map(str.strip, re.split(r",(?![^(\[]*[)\]])", match[1]))):
        if part == "*":
            only = True
        else:
            name, _, default = part.partition("=")
            found.append((name.split()[-1], bool(default), only))
    return found


def misfit(call, wanted):
    """Return the reason why a call does not fit these parameters; None if it fits or if this is unknown."""
    if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
        return None
    names = [name for name, _, only in wanted if not only]
    if len(call.args) > len(names):
        return f"{len(call.args)} arguments for {names}"
    given = set(names[:len(call.args)]) | {one.arg for one in call.keywords}
    unknown = given - {name for name, *_ in wanted}
    lacking = {name for name, has_default, _ in wanted if not has_default} - given
    return f"unknown {sorted(unknown)}" if unknown else f"lacking {sorted(lacking)}" if lacking else None


def calls():
    """Check that all our dotted names exist, and that every call fits the parameters."""
    seen, wrong = 0, []
    for path in sorted({path for pattern in USERS for path in ROOT.glob(pattern) if FACES not in path.parents}):
        for line, words, call in names_of(path):
            where = f"{path.relative_to(ROOT)}:{line}: {'.'.join(words)}"
            seen += 1
            try:
                found = resolved(words)
            except AttributeError as error:
                wrong.append(f"{where}: not there: {error}")
                continue
            except RuntimeError:  # a property asking the driver
                continue
            wanted = parameters(found) if call is not None and callable(found) else None
            if wanted is not None:
                why = misfit(call, [one for one in wanted if one[0] != "self"])
                wrong += [f"{where}: {why}"] if why else []
    return seen, wrong


def surface():
    """Check that the emulation's names exist in the real CuPy, with parameters of the same names."""
    tree = {"cupy.cuda.runtime": "cupy/cuda/runtime.py", "cupy.cuda.nccl": "cupy/cuda/nccl.py",
            "cupy.cuda": "cupy/cuda/stream.py", "cuda.bindings.driver": "cuda/bindings/driver.py"}
    seen, wrong = 0, []
    for module, name in tree.items():
        real = importlib.import_module(module)
        for node in ast.parse((FACES / name).read_text()).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            members = [node] if isinstance(node, ast.FunctionDef) else [
                one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
            owner = real if isinstance(node, ast.FunctionDef) else getattr(real, node.name, None)
            for one in members:
                seen += 1
                there = getattr(owner, one.name, None)
                if there is None:
                    wrong.append(f"{module}: the emulation's {node.name}.{one.name} is not CuPy's")
                    continue
                wanted = parameters(there)
                ours = [a.arg for a in (*one.args.posonlyargs, *one.args.args) if a.arg not in ("self", "cls")]
                theirs = [name for name, *_ in wanted or () if name not in ("self", "cls")]
                if wanted is not None and ours != theirs[:len(ours)]:
                    wrong.append(f"{module}.{one.name}: {ours} stand for {theirs}")
    return seen, wrong


def symbols():
    """Check that NCCL's library has every function called directly, as far as its version promises."""
    from gpucoll.device import nccl
    from gpucoll.device.nccl_settings import NcclFields, SelectionFields

    library, version = ctypes.CDLL("libnccl.so.2"), nccl.version()
    wrong = [f"NCCL {version} has no {name}" for collective, name in nccl.FOREIGN.items()
             if nccl.lacks(collective) is None and not hasattr(library, name)]
    if nccl.lacks_selection() is None:
        wrong += [f"NCCL {version} has no {name}" for name in nccl.SELECTING.values() if not hasattr(library, name)]
        (header,) = (Path(one) / "nccl/include/nccl.h" for one in importlib.import_module("nvidia").__path__)
        fields = re.search(r"typedef struct ncclCollConfig\w* {(.*?)\n}", header.read_text(), re.DOTALL)[1]
        there = re.findall(r"(\w+);", re.sub(r"/\*.*?\*/", "", fields, flags=re.DOTALL))
        ours = [name for name, _ in SelectionFields._fields_]
        if [one.lower() for one in there[:len(ours)]] != [one.replace("_", "") for one in ours]:
            wrong.append(f"NCCL's ncclCollConfig_t has the fields {there}")
    windows = ("ncclMemAlloc", "ncclMemFree", "ncclCommWindowRegister", "ncclCommWindowDeregister")
    if version >= nccl.WINDOWS_SINCE:
        wrong += [f"NCCL {version} has no {name}" for name in windows if not hasattr(library, name)]
    name = {"name": "tp"} if nccl.nccl.get_build_version() >= 22700 else {}
    config = nccl.written(nccl.nccl.NcclConfig(), {"max_ctas": 8, "split_share": True, **name})
    memory = ctypes.string_at(id(config), config.__sizeof__()) + bytes(ctypes.sizeof(NcclFields))
    fields = NcclFields.from_buffer_copy(memory, 16)
    if (fields.max_ctas, fields.split_share, config.split_share) != (8, 1, 1) or (name and fields.name != b"tp"):
        wrong.append("CuPy's NcclConfig has NCCL's struct at another place")
    return version, wrong


def driver():
    """Pass all arguments of multicast memory to the real cuda-bindings; return the names of the called functions.

    Without CUDA's driver a function raises RuntimeError after taking its arguments.
    """
    from cuda.bindings import driver as real

    from gpucoll.executors.peer import multicast
    from gpucoll.executors.peer.tables import Multicast

    called, wrong = set(), []
    results = {"cuMulticastGetGranularity": 1 << 21, "cuMemGetAllocationGranularity": 1 << 21,
               "cuMemExportToShareableHandle": lambda kind: os.dup(0) if kind == 1 else real.CUmemFabricHandle()}
    handles = {"cuMulticastCreate", "cuMemCreate", "cuMemImportFromShareableHandle"}

    class Driver:
        def __getattr__(self, name):
            if not re.match("cu[A-Z]", name):
                return getattr(real, name)

            def call(*arguments):
                called.add(name)
                try:
                    getattr(real, name)(*arguments)
                except RuntimeError:
                    pass
                except Exception as error:
                    wrong.append(f"{name}: {error!r}")
                made = real.CUmemGenericAllocationHandle(1) if name in handles else results.get(name, 1 << 30)
                return real.CUresult.CUDA_SUCCESS, made(arguments[1]) if callable(made) else made

            return call

    def alone(words):
        yield lambda: True
        return [words]

    def done(operation):
        while True:
            try:
                next(operation)
            except StopIteration as stop:
                return stop.value

    device = types.SimpleNamespace(ordinal=0, current=contextlib.nullcontext(), clear=lambda *_: None,
                                   after_all=lambda unmap: unmap())
    sys.modules["cuda.bindings.driver"] = sys.modules["cuda.bindings"].driver = Driver()
    for by_fabric in (True, False):
        maker = multicast.MemoryDriver(device, 0, 1, by_fabric=by_fabric)
        done(maker.agree(alone))
        memory = multicast.MulticastMemory(maker, 1 << 25)
        words, found = memory.export(), done(memory.join(alone, [[]]))
        # As if the words came from another rank.
        memory._map_all([[], [multicast._FABRIC.pack(*words[1:9]) if by_fabric else os.dup(0)]], [])
        if found != Multicast(1 << 30, 1 << 30, [1 << 30]):
            wrong.append(f"join returned {found}")
        memory.close()
        del memory
    return len(called), wrong


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    print(json.dumps({one.__name__: one() for one in (calls, surface, symbols, driver)}))
