"""Words for data loaders.

``DistributedSampler`` is PyTorch's with a position, which another number of ranks takes up. ``Stream`` reads a stream
of ``datasets`` by its shards.
"""

from .sampler import DistributedSampler
from .streams import Stream

__all__ = ["DistributedSampler", "Stream"]
