"""The public names are exactly the agreed names, and importing the package starts nothing."""

import pickle

import gpucoll as gc
from gpucoll.cli import main
from harness.jobs import python
from harness.refusals import refused

# Programs rely on these names: none may disappear, and none may appear by accident.
NAMES = """ArgumentError BackendError ClosedError CollectiveTimeout Communicator DtypeError GpucollError MismatchError
PeerError RankFailedError ReduceOp RevokedError UsageError Work algorithms elementwise_op init init_local on_terminate
premul_sum run_local schedule algorithm load Copy Recv RecvReduce Reduce Send Slice ANY_SOURCE ANY_TAG PROC_NULL
join Status Transport draw precheck""".split()
METHODS = """all_gather all_gather_object all_gather_v all_reduce all_to_all all_to_all_v barrier broadcast
broadcast_object check_numerics close empty explain exscan from_mpi gather gather_object gather_v group grow iprobe
maxloc minloc plan probe recv reduce reduce_scatter reduce_scatter_v replace scan scatter scatter_object scatter_v send
sendrecv shrink split stats zeros""".split()
ATTRIBUTES = """check closed device executor local_rank local_size mpi node nodes rank size
timeout""".split()


def test_the_names_are_the_agreed_ones_and_documented():
    assert sorted(gc.__all__) == sorted(NAMES)
    assert all(getattr(gc, name).__doc__ for name in NAMES)
    with gc.init_local(1)[0] as comm:  # other libraries' names are no part of it
        public = {name for name in dir(comm) if name[0].islower()} - {"address", "mpi", "options"}
    assert public == set(METHODS) | set(ATTRIBUTES) - {"mpi"}  # each object sets `mpi`, not the class
    assert all(getattr(gc.Communicator, name).__doc__ for name in public)


def test_the_errors_are_the_contracts_and_survive_pickling():
    bases = {gc.ArgumentError: ValueError, gc.DtypeError: TypeError, gc.CollectiveTimeout: TimeoutError}
    for kind, base in bases.items():
        assert issubclass(kind, base)
        assert issubclass(kind, gc.GpucollError)
    assert issubclass(gc.GpucollError, RuntimeError)
    error = gc.PeerError("rank 3 refused", ranks=(3,))
    assert (error.code, error.ranks) == ("GC-PEER", (3,))
    error = pickle.loads(pickle.dumps(gc.ArgumentError("no", code="GC-ROOT", ranks=(1,))))
    assert (type(error), str(error), error.code, error.ranks) == (gc.ArgumentError, "[GC-ROOT] no", "GC-ROOT", (1,))


def test_import_starts_neither_mpi_nor_cupy_and_proofs_need_neither():
    script = ("import os, sys; before = dict(os.environ); import gpucoll.distributed; assert os.environ == before; "
              "assert not {'cupy', 'torch', 'mpi4py.MPI', 'ml_dtypes'} & set(sys.modules); "
              "sys.modules['mpi4py'] = None; from gpucoll.lab.verify import verify; verify('reduce', 'tree', 7)")
    job = python("-c", script)
    assert job.returncode == 0, job.stderr


def test_the_command_alone_helps_says_its_version_and_refuses_in_a_line(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: gpucoll")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gpucoll {gc.__version__}\n"
    for words in (["nonsense"], ["--nonsense"]):
        assert "nonsense" in refused(capsys, main, words)
