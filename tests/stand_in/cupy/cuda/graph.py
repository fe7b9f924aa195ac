"""CuPy's graphs: made by stream capture only."""

import sys

from . import runtime


class Graph:
    _handle = 0

    def __del__(self, is_shutting_down=sys.is_finalizing):
        if not is_shutting_down():
            runtime.graphDestroy(self._handle)

    def launch(self, stream=None):
        from . import stream as stream_module

        runtime.graphLaunch(self._handle, (stream_module.get_current_stream() if stream is None else stream).ptr)
