"""mpi4py's own tests, with `gpucoll.mpi.Comm` instead of mpi4py's communicators: FOLDER MODULE...

Arrays given as DLPack capsules made by the suite are left out: the suite frees such an array with the capsule, while a
consumer, like NumPy's from_dlpack, may use the array longer. All other tests pass. Calls with unsupported dtypes (long
double), derived datatypes, and pretended GPU memory are passed on to mpi4py.
"""

import collections
import importlib
import sys
import unittest

from mpi4py import MPI

import gpucoll.mpi

CALLS = collections.Counter()


class Counted(gpucoll.mpi.Comm):
    """Counts the calls made by gpucoll; all other calls go to mpi4py."""

    def __init__(self, mpi, **options):
        super().__init__(mpi, **options)
        for name in ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "all_to_all", "scan",
                     "exscan", "reduce_scatter", "reduce_scatter_v", "all_gather_v", "gather_v", "scatter_v",
                     "all_to_all_v"):
            setattr(self.comm, name, counting(getattr(self.comm, name)))


def counting(call):
    def counted(*arguments, **options):
        CALLS["ours"] += 1
        return call(*arguments, **options)

    return counted


class Names:
    """The module MPI with communicators of gpucoll."""

    def __getattr__(self, name):
        return getattr(MPI, name)


def main(folder, *modules):
    sys.path.insert(0, folder)
    arrays = importlib.import_module("arrayimpl")
    arrays.ArrayBackends[:] = [one for one in arrays.ArrayBackends if not one.backend.startswith("dlpack")]
    names = Names()
    names.COMM_WORLD, names.COMM_SELF = Counted(MPI.COMM_WORLD, timeout=60.0), Counted(MPI.COMM_SELF, timeout=60.0)
    suite = unittest.TestSuite()
    for name in modules:
        module = importlib.import_module(name)
        module.MPI = names
        for kind in vars(module).values():
            comm = vars(kind).get("COMM") if isinstance(kind, type) else None
            if comm is not None and comm != MPI.COMM_NULL:
                kind.COMM = names.COMM_WORLD if comm == MPI.COMM_WORLD else names.COMM_SELF
        suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
    result = unittest.TextTestRunner(failfast=True).run(suite)
    print(f"rank {MPI.COMM_WORLD.rank}: {result.testsRun} tests, {CALLS['ours']} calls ours", flush=True)
    if not result.wasSuccessful():
        MPI.COMM_WORLD.Abort(1)  # the other ranks may be waiting


if __name__ == "__main__":
    main(*sys.argv[1:])
