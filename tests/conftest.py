"""For all tests: how they are divided between processes, where pytest-xdist is installed."""

import importlib.util
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
if importlib.util.find_spec("xdist") is not None:
    from by_file import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler
