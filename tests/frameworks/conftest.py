"""Tests with packages that only the environment of scripts/frameworks.sh has; elsewhere there is nothing to collect."""

import importlib.util
import os
import sys
from pathlib import Path

# datasets, which trainers import, would start a thread for its memory; ranks are forked from a process with one.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

PACKAGES = (
    "accelerate",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "flashoptim",
    "lightning",
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
