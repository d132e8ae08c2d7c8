"""A device for the tests of this directory; without one they are skipped, with the reason."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))  # test_replay.py, whose code runs on a device, too


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of this process."""
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device is to be seen (torch {torch.__version__}); the fake driver's tests run everywhere")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def replay() -> Callable:
    """Replays steps, as ``test_replay.replayer`` says."""
    if shutil.which("cargo") is None:
        pytest.skip("no cargo to build the program that replays")
    from test_replay import replayer

    return replayer()
