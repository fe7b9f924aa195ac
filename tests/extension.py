"""The engine built by gxx of texts that tests change, or sanitizers look into, beside the one that is installed."""

import contextlib
import functools
import importlib.machinery
import importlib.util
import shutil
import sysconfig

import numpy

from gpucoll.device.gxx import compile_shared, recipe
from gpucoll.device.sources import folder, inlined
from gpucoll.device.store import user_store
from gpucoll.executors import shared
from gpucoll.executors.shared.digest import FIRST, MACRO, MODULE, digest

# One version of each function: who chooses between two comes before the sanitizers are there.
FOLDERS = ["-DGC_ONE_VERSION", *[f"-I{place}" for place in (sysconfig.get_paths()["include"], numpy.get_include())]]


def text():
    """The engine's sources as one."""
    return inlined(FIRST, set())


def compiled(source, *options, place=None):
    """The shared object of a source; it passes for one of the sources in the folder `place`, or the package's own."""
    return compile_shared(source, f'-D{MACRO}="{digest(place or folder())}"', *FOLDERS, *options)


def built(source, *options):
    """The module that is made of `source`, kept in the user's store."""
    flags = "\n".join([recipe(), *FOLDERS, *options])
    path = user_store().path(source, ".so", functools.partial(compiled, source, *options), flags=flags)
    name = f"changed.{MODULE.rpartition('.')[2]}"  # the installed one stays what it is
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


def install(tree):
    """A copied tree has the engine of its own sources in its package: the one that is installed where it fits."""
    here, place = shared.library(), tree / "kernels"
    name = MODULE.replace(".", "/") + sysconfig.get_config_var("EXT_SUFFIX")
    if here is not None and here.sources == digest(place):
        shutil.copy(here.__file__, tree / name)
    else:
        (tree / name).write_bytes(compiled(f'#include "{FIRST}"\n', f"-I{place}", place=place))


@contextlib.contextmanager
def serving(module):
    """Communicators that are made in the block have this engine."""
    before = shared.library
    shared.library = lambda: module
    try:
        yield
    finally:
        shared.library = before
