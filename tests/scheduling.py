"""How pytest-xdist hands out tests: groups to one worker each, and what a worker dies of is not run again.

xdist's own scheduler of groups gives the test that a worker crashed in to the next worker, until none is left, and
waits for ever where a new worker gets a single test.
"""

from xdist.scheduler import LoadGroupScheduling


class Scheduling(LoadGroupScheduling):
    def remove_node(self, node):
        """The test that the worker crashed in, if it did; its other tests are for the next worker."""
        units = self.assigned_work.pop(node)
        left = [(unit, name) for unit in units.values() for name, is_done in unit.items() if not is_done]
        if not left:
            return None
        unit, crashed = left[0]
        unit[crashed] = True
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def schedule(self):
        """A worker runs its last test when it knows that no other follows."""
        super().schedule()
        if self.collection and not self.workqueue:
            for node in self.nodes:
                if not node.shutting_down:
                    node.shutdown()
