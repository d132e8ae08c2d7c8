"""Tests with packages that only the environment of scripts/frameworks.sh has; elsewhere there is nothing to collect."""

import functools
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import shardfast as sf

# datasets, which trainers import, would start a thread for its memory; ranks are forked from a process with one.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

PACKAGES = (
    "accelerate",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "flashoptim",
    "lightning",
    "ray",
    "torchao",
    "torchtitan",
    "transformers",
)
IS_THERE = all(importlib.util.find_spec(name) is not None for name in PACKAGES)

collect_ignore_glob = [] if IS_THERE else ["test_*.py"]

# The ranks of tests/python, which import other modules there; a second one called conftest cannot be imported by name.
_python = Path(__file__).parents[1] / "python"
sys.path.append(str(_python))
_spec = importlib.util.spec_from_file_location("ranks_of_tests", _python / "conftest.py")
_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_ranks)
ranks, rank_server = _ranks.ranks, _ranks.rank_server


class Held:
    """Saves that are held back, or fail, once they are begun.

    Attributes:
        waits: An event that the commits of saves wait for, from the next save on; `None` holds none back.
        fails: Whether saves fail from the next one on, though their checkpoints are durable.
        order: The places of those that have become durable.
    """

    def __init__(self):
        self.waits, self.fails, self.order = None, False, []

    def hold(self, save, url, *args, **named):
        """Begins a save."""
        pending = save(url, *args, **named)
        committed, waits, fails = pending.committed, self.waits, self.fails

        def commit(*more):
            if waits is not None:
                waits.wait(20)
            committed(*more)
            self.order.append(Path(url))
            if fails:
                raise sf.Unavailable("the disk is gone")

        pending.committed = commit
        return pending


@pytest.fixture
def held(monkeypatch):
    """How the saves of this test are held back."""
    one = Held()
    monkeypatch.setattr(sf, "save_async", functools.partial(one.hold, sf.save_async))
    return one
