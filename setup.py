"""The engine, an extension module for pyproject.toml's package, skipped by installations without a C++ compiler."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy
from setuptools import Extension, setup

ROOT = Path(__file__).parent
engine = SimpleNamespace(**runpy.run_path(str(ROOT / "gpucoll" / "executors" / "engine" / "digest.py")))
names = [f"kernels/{name}" for name in engine.sources(ROOT / "kernels")]
# The options of the device's kernels for the CPU (gpucoll/device/gxx.py): bits as on a GPU, on every processor.
OPTIONS = ["-O3", "-g0", "-std=c++17", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing",
           "-fno-trapping-math"]

setup(
    ext_modules=[Extension(engine.MODULE, names[:1], include_dirs=["kernels", numpy.get_include()], depends=names,
                           define_macros=[(engine.MACRO, f'"{engine.digest(ROOT / "kernels")}"')],
                           extra_compile_args=OPTIONS, language="c++", optional=True)],
    # Always rebuild: copied files may be older than the build of other sources, so times are no proof.
    options={"build_ext": {"force": True}},
)
