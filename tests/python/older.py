"""What the oldest PyTorch that Shardfast works with lacks or does otherwise, as far as tests meet it."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

IS_OLDER = torch.__version__ < (2, 15)
"""Whether this is not the newest PyTorch that is tested. All that hangs on it is true of 2.7.1."""

TABLE = "__dlpack_c_exchange_api__"
"""The attribute of a class of tensors that holds DLPack's exchange table."""

AVERAGED = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)} if IS_OLDER else {}
"""Options of ``fully_shard`` for ranks on gloo: of gradients in float32 and bfloat16, PyTorch 2.7 asks gloo for the
average, which gives it the sum or an error."""

HIDDEN, EXPERTS = (12, 4) if IS_OLDER else (10, 5)
"""Dimensions that tensor or expert parallelism cuts, and then FSDP2. That of PyTorch 2.7 cuts these evenly only."""
