"""The engine, built from changed texts or with sanitizers, beside the installed engine."""

import contextlib
import functools
import importlib.machinery
import importlib.util
import shutil
import sysconfig
from pathlib import Path
from unittest import mock

import numpy

from faults import tables
from gpucoll.device.sources import folder, inlined
from gpucoll.device.store import compile_shared, recipe, user_store
from gpucoll.executors import engine
from gpucoll.executors.engine.digest import FIRST_SOURCE, MACRO, MODULE, digest
from harness import budgets

PIECE = 1 << 14  # bytes of a piece of a message by `by_python`
# One version of each function: choosing between versions would happen before the sanitizers are loaded.
FOLDERS = ["-DGC_ONE_VERSION", *[f"-I{place}" for place in (sysconfig.get_paths()["include"], numpy.get_include())]]


def text():
    """Return the engine's sources as one text."""
    return inlined(FIRST_SOURCE, set())


def changed(changes):
    """Return the engine's sources as one text, with planted faults."""
    return tables.changed(text(), changes)


def compiled(source, *options, place=None):
    """Return the shared object of a source, with the digest of the sources in `place` or in the package."""
    with budgets.compiling():
        return compile_shared(source, f'-D{MACRO}="{digest(place or folder())}"', *FOLDERS, *options)


def built(source, *options):
    """Return the module built from `source`; the build is kept in the user's store."""
    flags = "\n".join([recipe(), *FOLDERS, *options])
    path = user_store().path(source, ".so", functools.partial(compiled, source, *options), flags=flags)
    return loaded(f"changed.{MODULE.rpartition('.')[2]}", path)  # the installed module stays unchanged


def binding(source, *options):
    """Return the path of the binding of UCX, built from `source`; ImportError without nanobind."""
    nanobind = importlib.import_module("nanobind")
    sources = Path(nanobind.source_dir())
    places = [nanobind.include_dir(), sources, sources.parent / "ext" / "robin_map" / "include"]
    flags = [*FOLDERS, *[f"-I{place}" for place in places], "-fvisibility=hidden", *options]
    text = f'{source}\n#include "nb_combined.cpp"\n'
    build = functools.partial(compile_shared, text, *flags)
    return user_store().path(text, ".so", build, flags="\n".join([recipe(), *flags]))


def loaded(name, path):
    """Return the extension module at a path, under a name."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


def install(tree):
    """Give a copied tree an engine of its own sources, a copy if the sources are equal, and the binding of UCX."""
    binding = importlib.util.find_spec("gpucoll._ucx")
    if binding is not None:
        shutil.copy(binding.origin, tree / "gpucoll")
    here, place = engine.library(), tree / "kernels"
    name = MODULE.replace(".", "/") + sysconfig.get_config_var("EXT_SUFFIX")
    if here.sources == digest(place):
        shutil.copy(here.__file__, tree / name)
    else:
        (tree / name).write_bytes(compiled(f'#include "{FIRST_SOURCE}"\n', f"-I{place}", place=place))


def by_python():
    """Let threads send by Python's messages, in short pieces, as a store's ranks do: a context."""
    return mock.patch("gpucoll.executors.engine.between_nodes.wire_of",
                      lambda link, *_: engine.library().python_wire(link.wire, PIECE))


@contextlib.contextmanager
def serving(module):
    """Let communicators created in the block use this engine."""
    before = engine.library
    engine.library = lambda: module
    try:
        yield
    finally:
        engine.library = before
