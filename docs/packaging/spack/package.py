# Copyright Spack Project Developers. See COPYRIGHT file for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)
from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyGpucoll(PythonPackage):
    """Collective communication for NumPy and CuPy arrays over MPI and NCCL, where an algorithm
    is data."""

    homepage = "https://gpucoll.example"
    pypi = "gpucoll/gpucoll-0.2.0.tar.gz"

    maintainers("gpucoll-authors")

    license("MIT", checked_by="gpucoll-authors")

    # The digest of the published archive stands here.
    version("0.2.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    variant("cuda", default=False, description="CuPy arrays by NCCL and by kernels")
    variant("ucx", default=False, description="Messages between hosts without MPI")

    depends_on("cxx", type="build")
    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-nanobind@2:", type="build")
    depends_on("py-numpy@2.3:", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-platformdirs@3:", type=("build", "run"))
    depends_on("py-filelock@3.20.1:", type=("build", "run"))
    depends_on("py-prometheus-client@0.8:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.5:", type=("build", "run"))
    depends_on("py-cupy@14:", type="run", when="+cuda")
    depends_on("nccl@2.18.1:", type="run", when="+cuda")
    depends_on("ucx@1.10:", type="run", when="+ucx")

    import_modules = ["gpucoll", "gpucoll.mpi", "gpucoll.distributed"]
