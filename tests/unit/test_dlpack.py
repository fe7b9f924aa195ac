"""Host arrays with only DLPack as interface are read and written in place."""

import gc as garbage
import weakref

import numpy
import pytest

import gpucoll as gc
from gpucoll.arrays import as_array


class Unversioned:
    """An exporter from before DLPack 1.0, unable to mark an array read-only."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


class Versioned(Unversioned):
    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("kind", [Unversioned, Versioned])
def test_a_result_is_written_into_what_has_only_dlpack(kind):
    def run(comm):
        x, out = numpy.arange(6).reshape(2, 3) + 10 * comm.rank, numpy.zeros((2, 3), int)
        given = kind(out)
        assert comm.all_reduce(kind(x), given) is given
        both = numpy.zeros((3, 4))[:, ::2]  # with gaps
        comm.broadcast(kind(both) if comm.rank else numpy.full((3, 2), 7.0))
        place = numpy.full(3, comm.rank + 1.0)
        comm.all_reduce(kind(place), kind(place), op="max")
        return out, both if comm.rank else numpy.full((3, 2), 7.0), place

    for out, both, place in gc.run_local(run, 3):
        assert (out == 3 * numpy.arange(6).reshape(2, 3) + 30).all()
        assert (both == 7).all()
        assert (place == 3).all()


def test_what_says_that_it_is_read_only_is_not_written():
    out = numpy.zeros(3)
    out.flags.writeable = False
    with pytest.raises(gc.ArgumentError, match="out is read-only") as caught:
        gc.run_local(lambda comm: comm.all_reduce(numpy.ones(3), Versioned(out)), 1)
    assert caught.value.code == "GC-READONLY"
    assert (out == 0).all()


@pytest.mark.parametrize("array", [numpy.zeros(0), numpy.array(3.0), numpy.zeros((2, 0, 3), "f4"),
                                   numpy.arange(12).reshape(3, 4)[::-1, ::2], numpy.ones((2, 3), "c8", order="F")])
def test_shapes_and_strides_are_the_exporters(array):
    opened = as_array("", "x", Unversioned(array))
    assert opened.flags.writeable
    assert (opened.dtype, opened.shape) == (array.dtype, array.shape)
    assert opened.strides == array.strides or not array.size
    assert (opened == array).all()


def test_the_memory_lives_as_long_as_what_was_opened():
    array = numpy.arange(5)
    known = weakref.ref(array)
    opened = as_array("", "x", Unversioned(array))[2:]
    del array
    garbage.collect()
    assert known() is not None
    opened[0] = 9
    assert opened.tolist() == [9, 3, 4]
    del opened
    garbage.collect()
    assert known() is None
