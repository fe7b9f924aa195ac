"""CuPy's graphs: made by stream capture only."""

import sys

from . import runtime


class Graph:
    def __init__(self, handle):
        self._handle = handle

    def __del__(self, is_shutting_down=sys.is_finalizing):
        if not is_shutting_down():
            runtime.graphDestroy(self._handle)

    def launch(self, stream=None):
        from .stream import get_current_stream

        runtime.graphLaunch(self._handle, (get_current_stream() if stream is None else stream).ptr)
