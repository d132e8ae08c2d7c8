"""Tests of one file run in one process, in their order; a test that ends its process is over, and the others run.

pytest-xdist's ``loadfile`` puts a test that ended its process back into the queue, and plans work for processes that
have not said yet which tests they have. And a process runs its last test when it knows of a next one, or that there is
none: the new one, given one test, waits for ever.
"""

from collections.abc import Callable

import pytest
from xdist.scheduler import LoadFileScheduling

AHEAD = 2
"""Tests that a process has before it needs no more."""


class ByFile(LoadFileScheduling):
    def remove_node(self, node: object) -> str | None:
        """Returns the test that a process ran when it ended; what else it was to run goes to others."""
        work = self.assigned_work.pop(node)
        begun = next((test for unit in work.values() for test, is_done in unit.items() if not is_done), None)
        for unit in work.values():
            if begun in unit:
                unit[begun] = True
        self.workqueue.update({name: unit for name, unit in work.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return begun

    def _reschedule(self, node: object) -> None:
        """Gives a process files until it has tests enough, or tells it that there are no more."""
        if node.shutting_down or node not in self.registered_collections:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= AHEAD:
            try:
                self._assign_work_unit(node)
            except OSError:
                return  # it has just ended: remove_node() gives its work to others
        if not self.workqueue:
            node.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable) -> ByFile | None:
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None
