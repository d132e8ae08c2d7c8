"""Tests with what receives metrics and traces, which scripts/receivers.sh makes and runs; else none is collected."""

import importlib.util
import os
import sys
from pathlib import Path

collect_ignore_glob = [] if "SHARDFAST_TEST_RECEIVERS" in os.environ else ["test_*.py"]

# The ranks of tests/python, which import other modules there; a second one called conftest cannot be imported by name.
_python = Path(__file__).parents[1] / "python"
sys.path.append(str(_python))
_spec = importlib.util.spec_from_file_location("ranks_of_tests", _python / "conftest.py")
_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_ranks)
ranks, rank_server = _ranks.ranks, _ranks.rank_server
