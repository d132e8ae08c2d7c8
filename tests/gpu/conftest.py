"""A device for the tests of this directory; without one they are skipped, with the reason."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of this process."""
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device is to be seen (torch {torch.__version__}); the fake driver's tests run everywhere")
    return torch.device("cuda", torch.cuda.current_device())
