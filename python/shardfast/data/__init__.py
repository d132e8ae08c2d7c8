"""Words for data loaders.

``DistributedSampler`` is PyTorch's with a position, which another number of ranks takes up.
"""

from .sampler import DistributedSampler

__all__ = ["DistributedSampler"]
