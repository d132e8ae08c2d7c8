"""One small model in every layout, holding numbers that are known without any layout.

The sizes are chosen to be uneven: eleven rows on four ranks, ten cut by tensor parallelism and then by FSDP2, and two
rows on four ranks, of which two hold nothing.
"""

import functools
import zlib
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

VOCABULARY, WIDTH, HIDDEN, CONTEXT = 11, 8, 10, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.ones(2, WIDTH))
        self.register_buffer("temperature", torch.tensor([0.5, 2.0]))
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) * self.gain.sum(0)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * self.temperature.sum()


# Layouts by name: how a model is laid out on the ranks of the default group.


def _mesh(outer: int, *names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (outer, dist.get_world_size() // outer), mesh_dim_names=names)


def _tensor_parallel(model: Net, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _fully_shard(model: Net, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp_tp(model: Net) -> nn.Module:
    world = dist.get_world_size()
    mesh = _mesh(world // 2, "dp", "tp")
    _tensor_parallel(model, mesh["tp"])
    return _fully_shard(model, mesh["dp"])


def _tp(model: Net) -> nn.Module:
    _tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    return model


def _fsdp1(strategy: ShardingStrategy, use_orig_params: bool, model: Net) -> nn.Module:
    is_hybrid = strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        device_mesh=_mesh(2, "replicas", "shards") if is_hybrid else None,
    )


FSDP1 = {
    f"fsdp1_{strategy.name.strip('_').lower()}_{kind}": functools.partial(_fsdp1, strategy, use_orig_params)
    for strategy in ShardingStrategy
    for kind, use_orig_params in (("orig", True), ("flat", False))
}
"""``FullyShardedDataParallel``; those with groups of replicas need an even number of ranks, four at least."""

LAYOUTS = {
    "plain": lambda model: model,
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp": lambda model: _fully_shard(model, init_device_mesh("cpu", (dist.get_world_size(),))),
    "hsdp": lambda model: _fully_shard(model, _mesh(2, "replicas", "shards")),
    "fsdp_tp": _fsdp_tp,
    "tp": _tp,
    **FSDP1,
}
PARALLEL = [name for name in LAYOUTS if name != "plain" and name not in FSDP1]


def build(layout: str, seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    """The model in that layout, the same on every rank, and its optimizer, which has no state yet."""
    torch.manual_seed(seed)
    model = LAYOUTS[layout](Net())
    # Tensor parallelism alone leaves plain parameters beside DTensors: torch's fused kernels do not take both at once.
    is_fused = layout != "tp"
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=is_fused, foreach=False)


def batch(number: int, size: int = 8) -> Tensor:
    return torch.randint(VOCABULARY, (size, CONTEXT), generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """Steps on whole batches, the same on every rank, so that every layout computes the same up to rounding."""
    loss = torch.tensor(0.0)
    for step in steps:
        tokens = batch(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


# What a rank holds


def place(placements: tuple[Placement, ...]) -> list[int]:
    """Mesh dimensions in the order in which they cut: FSDP2 cuts what tensor parallelism left over."""
    strided = [axis for axis, placement in enumerate(placements) if type(placement).__name__ == "_StridedShard"]
    return [axis for axis in range(len(placements)) if axis not in strided] + strided


def cut(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """This rank's part of a tensor, said by ``torch.chunk`` alone."""
    for axis in place(placements):
        if placements[axis].is_replicate():
            continue
        dim = placements[axis].dim
        chunks = torch.chunk(whole, mesh.shape[axis], dim)
        index = mesh.get_coordinate()[axis]
        whole = chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


def local(tensor: Tensor) -> Tensor:
    """This rank's part, in the memory where it lies."""
    with torch.no_grad():
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return part.detach()


def mine(whole: Tensor, like: Tensor) -> Tensor:
    """The part of ``whole`` that a rank holds in the layout of ``like``."""
    return cut(whole, like.device_mesh, like.placements) if isinstance(like, DTensor) else whole


def same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    flat, expected = (t.detach().resolve_conj().contiguous().reshape(-1) for t in (one, other))
    return flat.numel() == 0 or torch.equal(flat.view(torch.uint8), expected.view(torch.uint8))


# The known numbers


def known(name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers that belong to a name, every one different."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


def plain_names(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names without wrappers."""
    module = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def expected() -> dict[str, Tensor]:
    """Every tensor of the known state, unsharded, by leaf name."""
    out = {}
    for name, tensor in plain_names(Net()).items():
        out[f"model/{name}"] = known(name, tuple(tensor.shape))
        if isinstance(tensor, nn.Parameter):
            for moment in ("exp_avg", "exp_avg_sq"):
                leaf = f"optimizer/state.{name}.{moment}"
                out[leaf] = known(leaf, tuple(tensor.shape))
            out[f"optimizer/state.{name}.step"] = torch.tensor(7.0)
    return out


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a model and its optimizer's state, by leaf name."""
    names = plain_names(model)
    out = {f"model/{name}": tensor for name, tensor in names.items()}
    for name, parameter in names.items():
        for part, value in optimizer.state.get(parameter, {}).items():
            out[f"optimizer/state.{name}.{part}"] = value
    return out


def fill(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer's state and puts the known numbers everywhere."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    numbers = expected()
    if isinstance(model, FullyShardedDataParallel):
        _fill_fsdp1(model, optimizer, numbers)
        return
    for name, tensor in held(model, optimizer).items():
        local(tensor).copy_(mine(numbers[name], tensor))


def differing(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the tensors that are not the known ones, bit by bit, in the rank's part of them; or are not there."""
    numbers = expected()
    if isinstance(model, FullyShardedDataParallel):
        whole = whole_of_fsdp1(model, optimizer)
        return [name for name in numbers | whole if not same_bits(numbers.get(name, torch.tensor(())), whole[name])]
    tensors = held(model, optimizer)
    wrong = [name for name in numbers if name not in tensors]
    return wrong + [
        name for name, tensor in tensors.items() if not same_bits(local(tensor), mine(numbers[name], tensor))
    ]


# FSDP1, by its own full state dicts


def _full(model: nn.Module) -> AbstractContextManager[object]:
    # With offload_to_cpu, torch 2.15 gives exp_avg as exp_avg_sq.
    return FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False),
    )


def whole_of_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a model under FSDP1 and of its optimizer, gathered by PyTorch, by leaf name."""
    with _full(model):
        tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    for name, parts in state.items():
        tensors |= {f"optimizer/state.{name}.{part}": value for part, value in parts.items()}
    return tensors


def _fill_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: dict[str, Tensor]) -> None:
    with _full(model):
        model.load_state_dict({name: numbers[f"model/{name}"] for name in model.state_dict()})
        whole = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        for name, parts in whole["state"].items():
            parts.update({part: numbers[f"optimizer/state.{name}.{part}"].clone() for part in parts})
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, whole))


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The plain tensors in which a rank's part of a state lies."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for parts in optimizer.state.values() for value in parts.values()]
    return list(map(local, tensors))
