"""Tests on file systems that scripts/mounted.sh makes ready and that are mounted here; else none is collected."""

import os
import sys
from pathlib import Path

collect_ignore_glob = [] if "SHARDFAST_TEST_MOUNTED" in os.environ else ["test_*.py"]

sys.path.append(str(Path(__file__).parents[1] / "python"))
