"""CuPy's graphs."""

import sys

from . import runtime


class Graph:
    _handle = 0

    def __init__(self, *_, **__):
        raise NotImplementedError("currently this class cannot be initiated by the user and must be created via stream "
                                  "capture")

    def __del__(self, is_shutting_down=sys.is_finalizing):
        if not is_shutting_down():
            runtime.graphDestroy(self._handle)

    def launch(self, stream=None):
        from . import stream as stream_module

        runtime.graphLaunch(self._handle, (stream_module.get_current_stream() if stream is None else stream).ptr)

    def upload(self, stream=None):
        pass
