"""`cupy.cuda.device`."""

from . import runtime


def get_device_id():
    return runtime.getDevice()


def __getattr__(name):
    from .. import cuda

    return getattr(cuda, name)
