"""The extension modules of pyproject.toml's package: the engine, and the binding of UCX.

The binding is left out where it cannot be built; without the engine there is no package.
"""

import importlib.util
import runpy
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import numpy
from setuptools import Extension, setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
engine = SimpleNamespace(**runpy.run_path(str(ROOT / "gpucoll" / "executors" / "engine" / "digest.py")))
names = [f"kernels/{name}" for name in engine.sources(ROOT / "kernels")]
# The options of the device's kernels for the CPU (gpucoll/device/gxx.py): bits as on a GPU, on every processor.
OPTIONS = ["-O3", "-g0", "-std=c++17", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing",
           "-fno-trapping-math"]


def ucx() -> "list[Extension]":
    """Return the binding of UCX, which is opened at run time: a build needs neither the library nor its headers."""
    if importlib.util.find_spec("nanobind") is None:
        return []
    import nanobind

    source = Path(nanobind.source_dir())
    free = [("NB_FREE_THREADED", None)] if sysconfig.get_config_var("Py_GIL_DISABLED") else []
    return [Extension("gpucoll._ucx", ["kernels/binding/ucx.cc", str(source / "nb_combined.cpp")],
                      include_dirs=["kernels", nanobind.include_dir(),
                                    str(source.parent / "ext" / "robin_map" / "include")],
                      depends=["kernels/binding/ucx.h", "kernels/engine/wire.h"], define_macros=free,
                      extra_compile_args=["-O2", "-g0", "-std=c++17", "-fvisibility=hidden", "-fno-strict-aliasing"],
                      language="c++", optional=True)]


class Sdist(sdist):
    """A source archive with all that its tests read, not the package alone."""

    def make_distribution(self) -> None:
        made = {"__pycache__", "gallery", "_drawings"}
        for folder in (".ci", ".github", "bench", "docs", "gpucoll", "kernels", "scripts", "tests"):
            self.filelist.extend([str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*")
                                  if path.is_file() and path.suffix not in (".so", ".pyc")
                                  and not made.intersection(path.relative_to(ROOT).parts)])
        self.filelist.extend(["CHANGELOG.md", "CONTRIBUTING.md", ".gitignore", ".pre-commit-config.yaml",
                              ".readthedocs.yaml"])
        super().make_distribution()


setup(
    cmdclass={"sdist": Sdist},
    ext_modules=[Extension(engine.MODULE, names[:1], include_dirs=["kernels", numpy.get_include()], depends=names,
                           define_macros=[(engine.MACRO, f'"{engine.digest(ROOT / "kernels")}"')],
                           extra_compile_args=OPTIONS, language="c++"), *ucx()],
    # Always rebuild: copied files may be older than the build of other sources, so times are no proof.
    # In parallel: either extension takes half a minute.
    options={"build_ext": {"force": True, "parallel": True}},
)
