"""NCCL's settings of a communicator: `gpucoll.init(nccl={...})`. What reaches NCCL: `gpu_splits.parts`."""

import ctypes

import pytest

import gpucoll as gc
from gpucoll.device.nccl_settings import NCCL_MAGIC, NcclFields, written


@pytest.mark.parametrize(("given", "words"), [
    ({"max_cta": 8}, "no .max_cta..*max_ctas"), ({"MAX_CTAS": 8}, "no .MAX_CTAS."), ({7: 8}, "no 7"),
    ({"blocking": 0}, "no .blocking."),
    ({"max_ctas": "8"}, "is not a number"), ({"max_ctas": -1}, "is not a number"), ({"max_ctas": 1 << 31}, "is not"),
    ({"max_ctas": 8.0}, "is not a number"), ({"name": 8}, "is not a text"), ({"name": ""}, "is not a text"),
    ({"name": "a\0b"}, "is not a text"), ([("max_ctas", 8)], "no dict")])
def test_wrong_settings_are_refused(given, words):
    with pytest.raises(gc.ArgumentError, match=words) as refused:
        gc.init_local(2, nccl=given)
    assert refused.value.code == "GC-OPTION"


def test_parts_inherit_the_settings():
    def settings(comm):
        return [one._core.options.nccl for one in (comm, comm.split(0))]

    given = {"max_ctas": 8, "windows": True}
    assert gc.run_local(settings, 2, nccl=given) == [[given] * 2] * 2


class Old(bytes):
    """The struct of NCCL 2.14, as CuPy's class has it inside."""


@pytest.mark.parametrize(("config", "settings"), [
    pytest.param(Old(NcclFields(size=20, magic=NCCL_MAGIC)), {"max_ctas": 8}, id="old"),
    pytest.param(Old(b""), {"max_ctas": 8}, id="none")])
def test_what_the_loaded_nccl_lacks_is_refused(config, settings):
    with pytest.raises(gc.BackendError, match="no setting max_ctas") as refused:
        written(config, settings)
    assert refused.value.code == "GC-NCCL"


def test_the_settings_are_nccls_fields_in_order():
    config = Old(NcclFields(size=ctypes.sizeof(NcclFields), magic=NCCL_MAGIC))
    assert ctypes.sizeof(NcclFields) == 72
    written(config, {"max_ctas": 8, "nvls_ctas": 3, "name": "tp", "split_share": True})
    found = NcclFields.from_buffer_copy(config)
    assert (found.max_ctas, found.nvls_ctas, found.name, found.split_share) == (8, 3, b"tp", 1)
