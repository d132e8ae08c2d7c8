"""veScale's ``RaggedShard`` where the package is on the path, and stand-ins with its names and attributes.

A family is the placements of one library and its class of DTensors.
"""

import dataclasses
import importlib.util
import itertools
import math
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree


@dataclasses.dataclass(frozen=True)
class RaggedShard(Placement):
    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __post_init__(self):
        Placement.__init__(self)


@dataclasses.dataclass(frozen=True)
class _StridedRaggedShard(RaggedShard):
    split_factor: int


class NeverMade:
    """Classes as veScale's dataclasses are: with PyTorch 2.15 a call of a method of their base ends the process."""

    @dataclasses.dataclass(frozen=True)
    class RaggedShard(Placement):
        dims: tuple[int, ...]
        local_units: tuple[int, ...]

    @dataclasses.dataclass(frozen=True)
    class _StridedRaggedShard(RaggedShard):
        split_factor: int


class DTensor(torch.Tensor):
    """Another library's: it runs operations on local tensors, whatever the placements."""

    __slots__ = ("_local_tensor", "_spec")

    @staticmethod
    def __new__(cls, local, spec, *, requires_grad):
        meta = spec.tensor_meta
        kind = {"dtype": local.dtype, "device": local.device, "requires_grad": requires_grad}
        made = torch.Tensor._make_wrapper_subclass(cls, meta.shape, strides=meta.stride, **kind)
        made._local_tensor, made._spec = local, spec
        return made

    @property
    def device_mesh(self):
        return self._spec.mesh

    @property
    def placements(self):
        return self._spec.placements

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        flat, _ = _pytree.tree_flatten((args, kwargs))
        first = next(one for one in flat if isinstance(one, cls))
        args, kwargs = _pytree.tree_map_only(cls, lambda one: one._local_tensor, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if result is first._local_tensor:
            return first  # it was changed in place
        meta = first._spec.tensor_meta._replace(dtype=result.dtype)
        return cls(result, DTensorSpec(first.device_mesh, first.placements, tensor_meta=meta), requires_grad=False)


class Family(NamedTuple):
    ragged: type
    strided: type
    tensor: type

    def dtensor(self, local, mesh, placements, shape):
        stride = tuple(itertools.accumulate(shape[:0:-1], lambda one, other: one * other, initial=1))[::-1]
        meta = TensorMeta(torch.Size(shape), stride, local.dtype)
        return self.tensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)

    def place(self, whole, mesh, placements):
        """A DTensor of this rank's part of ``whole``."""
        return self.dtensor(run(whole, mesh, placements).clone(), mesh, placements, tuple(whole.shape))


FAMILIES = {
    "made": Family(RaggedShard, _StridedRaggedShard, TorchDTensor),
    "never made": Family(NeverMade.RaggedShard, NeverMade._StridedRaggedShard, TorchDTensor),
    "another DTensor": Family(NeverMade.RaggedShard, NeverMade._StridedRaggedShard, DTensor),
}
if importlib.util.find_spec("vescale") is not None:  # scripts/vescale.sh
    import vescale.dtensor as of

    FAMILIES = {"vescale": Family(of.RaggedShard, of._StridedRaggedShard, of.DTensor)}


def run(whole, mesh, placements):
    """This rank's elements, said by ``torch.chunk`` and ``torch.split``: first all shards, then the run."""
    where, units = mesh.get_coordinate(), None
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            whole = torch.chunk(whole, mesh.shape[axis], placement.dim)[where[axis]]
        elif type(placement) is not Replicate:
            units, at = placement.local_units, where[axis]
    if units is None:
        return whole
    flat = whole.reshape(-1)
    return torch.split(flat, [math.prod(whole.shape) // sum(units) * unit for unit in units])[at]
