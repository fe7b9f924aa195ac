"""Captures and graphs: what one stream was given between `begin_capture` and `end_capture`."""

from ._machine import MACHINE, Mark, check


class Graph:
    """What a graph's handle stands for; a launch waits for the one before."""

    def __init__(self, nodes):
        self.nodes, self.last = nodes, ()

    def launch(self, queue):
        """Enqueue all nodes."""
        check(queue.capture is None, 900, "a graph inside a graph")
        MACHINE.submit(queue, lambda: _nothing, after=self.last)
        for begin in self.nodes:
            MACHINE.submit(queue, begin)
        self.last = [(queue, queue.issued)]


def _nothing():
    return True


def record(event, queue):
    """The event stands for what the stream has been given so far."""
    check(event.device == queue.device, 400, "event and stream are of different devices")
    check(queue.capture is None, 900, "the stand-in captures no events")
    with MACHINE.news:
        event.mark = mark = Mark(queue)
        MACHINE.submit(queue, lambda: mark.passed)


def wait(queue, event):
    """What the stream is given from here on follows the event."""
    if event.mark is not None:
        check(queue.capture is None, 905, "an event from outside in a capture")
        MACHINE.submit(queue, lambda: _nothing, after=[(event.mark.queue, event.mark.count)])
