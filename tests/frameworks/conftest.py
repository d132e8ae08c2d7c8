"""Tests with packages that only the environment of scripts/frameworks.sh has; elsewhere there is nothing to collect."""

import importlib.util
from pathlib import Path

IS_THERE = all(importlib.util.find_spec(name) is not None for name in ("accelerate", "lightning", "torchtitan"))

collect_ignore_glob = [] if IS_THERE else ["test_*.py"]

# The ranks of tests/python; a second module called conftest cannot be imported by name.
_spec = importlib.util.spec_from_file_location("ranks_of_tests", Path(__file__).parents[1] / "python" / "conftest.py")
_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_ranks)
ranks = _ranks.ranks
