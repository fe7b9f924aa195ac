"""The engine, an extension module of pyproject.toml's package; an installation without a C++ compiler goes without."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy
from setuptools import Extension, setup

ROOT = Path(__file__).parent
engine = SimpleNamespace(**runpy.run_path(str(ROOT / "gpucoll" / "executors" / "shared" / "digest.py")))
names = [f"kernels/{name}" for name in engine.sources(ROOT / "kernels")]
# As the device's kernels for the CPU (gpucoll/device/gxx.py): the bits of a GPU's arithmetic, on every processor.
OPTIONS = ["-O3", "-g0", "-std=c++17", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing",
           "-fno-trapping-math"]

setup(
    ext_modules=[Extension(engine.MODULE, names[:1], include_dirs=["kernels", numpy.get_include()], depends=names,
                           define_macros=[(engine.MACRO, f'"{engine.digest(ROOT / "kernels")}"')],
                           extra_compile_args=OPTIONS, language="c++", optional=True)],
    # Files that were copied may be older than what was built of others, so that their times tell nothing.
    options={"build_ext": {"force": True}},
)
