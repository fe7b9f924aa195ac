"""Captures and graphs: what streams were given between `begin_capture` and `end_capture`, and in which order."""

from ._machine import MACHINE, Mark, Queue, check


class CapturedMark:
    """A place in a capture: the nodes that come before it."""

    def __init__(self, capture, nodes):
        self.capture, self.nodes = capture, frozenset(nodes)


class Capture:
    """The nodes captured so far; `lines` are the streams that take part, with the nodes that their next one follows."""

    def __init__(self, origin):
        self.origin, self.nodes, self.lines = origin, [], {origin: frozenset()}
        origin.capture = self

    def add(self, queue, begin):
        self.nodes.append((queue, self.lines[queue], begin))
        self.lines[queue] = frozenset([len(self.nodes) - 1])

    def join(self, queue, mark):
        """`queue` waits for a mark of this capture, and takes part from here on."""
        check(queue.capture in (None, self), 902)
        check(queue.handle not in (0, 1), 906)
        queue.capture = self
        self.lines[queue] = self.lines.get(queue, frozenset()) | mark.nodes

    def end(self):
        """The graph; an error where a stream was not joined to the first one again."""
        for queue in self.lines:
            queue.capture = None
        before, found = list(self.lines[self.origin]), set()
        while before:
            node = before.pop()
            if node not in found:
                found.add(node)
                before += self.nodes[node][1]
        check(found == set(range(len(self.nodes))), 904)
        return Graph(self.nodes)


class Graph:
    """What a graph's handle stands for; a launch waits for the one before."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.last = ()

    def launch(self, queue):
        """Enqueue all nodes on queues of their own, between what `queue` has and what comes later."""
        check(queue.capture is None, 900, "a graph inside a graph")
        MACHINE.submit(queue, lambda: _nothing, after=self.last)
        start = (queue, queue.issued)
        lines = {line: Queue(line.device, False) for line, _, _ in self.nodes}
        with MACHINE.news:
            places = []
            for line, after, begin in self.nodes:
                own = lines[line]
                own.work.append(([start, *(places[node] for node in after)], begin()))
                own.issued += 1
                places.append((own, own.issued))
            MACHINE.queues += lines.values()
        MACHINE.submit(queue, lambda: _nothing, after=[(own, own.issued) for own in lines.values()])
        self.last = [(queue, queue.issued)]


def _nothing():
    return True


def record(event, queue):
    """The event stands for what the stream has been given so far."""
    check(event.device == queue.device, 400, "event and stream are of different devices")
    if queue.capture is not None:
        event.mark = CapturedMark(queue.capture, queue.capture.lines[queue])
        return
    with MACHINE.news:
        event.mark = mark = Mark(queue)
        MACHINE.submit(queue, lambda: mark.passed)


def wait(queue, event):
    """What the stream is given from here on follows the event."""
    mark = event.mark
    if isinstance(mark, CapturedMark):
        check(mark.capture.origin.capture is mark.capture, 907, "the capture of this event has ended")
        mark.capture.join(queue, mark)
    elif mark is not None:
        check(queue.capture is None, 905, "an event from outside in a capture")
        MACHINE.submit(queue, lambda: _nothing, after=[(mark.queue, mark.count)])
