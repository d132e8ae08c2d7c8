"""One small model in every layout, holding numbers that are known without any layout.

The sizes are chosen to be uneven: eleven rows on four ranks, ten cut by tensor parallelism and then by FSDP2, and two
rows on four ranks, of which two hold nothing.
"""

import copy
import functools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from older import AVERAGED, EXPERTS, HIDDEN, IS_OLDER
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
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

VOCABULARY, WIDTH, CONTEXT = 11, 8, 5

PAIRS_ONE_IN = int(os.environ.get("SHARDFAST_PAIRS_ONE_IN", "5"))
"""One in so many pairs of a layout that loads and one that was saved; a campaign takes each."""


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return x + self.down(F.dropout(hidden, self.dropout) if self.dropout else hidden)


class Experts(nn.Module):
    """Layers of which each rank may have some; all of them see all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.weight, DTensor):
            return x + torch.tanh(x.unsqueeze(-3) @ self.weight).sum(-3)
        mesh = self.weight.device_mesh
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        mixed = torch.tanh(whole.unsqueeze(-3) @ self.weight.to_local()).sum(-3)
        return x + DTensor.from_local(mixed, mesh, [Partial()], run_check=False).full_tensor()


class Net(nn.Module):
    """A model, or a stage of it: then what other stages have is ``None``, or not among the blocks."""

    def __init__(self, dropout: float = 0.0, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout, hidden), Block(dropout, hidden)])
        self.gain = nn.Parameter(torch.ones(2, WIDTH))
        self.register_buffer("temperature", torch.tensor([0.5, 2.0]))
        self.experts = Experts()
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x) * self.gain.sum(0)
        for block in self.blocks.children():
            x = block(x)
        return x if self.out is None else self.out(self.experts(x)) * self.temperature.sum()


def stage(whole: Net, index: int, count: int) -> Net:
    """One of ``count`` stages of a pipeline, at most four. Names are those of the whole model."""
    part = copy.deepcopy(whole)
    kept = range(4 * index // count, 4 * (index + 1) // count)
    # A slice of the list would count from 0 again.
    part.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(part.blocks) if number + 1 in kept})
    if 0 not in kept:
        part.tokens = part.gain = None
    if 3 not in kept:
        part.experts = part.out = part.temperature = None
    return part


# Layouts by name: how a model is laid out on the ranks of the default group.


@functools.cache
def mesh_of(outer: int, *names: str) -> DeviceMesh:
    """A mesh of two dimensions, the outer one of that size."""
    return init_device_mesh("cpu", (outer, dist.get_world_size() // outer), mesh_dim_names=names)


def _tensor_parallel(model: Net, mesh: DeviceMesh) -> None:
    for block in model.blocks.children():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _fully_shard(model: Net, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks.children():
        fully_shard(block, mesh=mesh, **AVERAGED)
    return fully_shard(model, mesh=mesh, **AVERAGED)


def _fsdp_tp(model: Net) -> nn.Module:
    world = dist.get_world_size()
    mesh = mesh_of(world // 2, "dp", "tp")
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
        device_mesh=mesh_of(2, "replicas", "shards") if is_hybrid else None,
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
    "hsdp": lambda model: _fully_shard(model, mesh_of(2, "replicas", "shards")),
    "fsdp_tp": _fsdp_tp,
    "tp": _tp,
    **FSDP1,
}
PARALLEL = [name for name in LAYOUTS if name != "plain" and name not in FSDP1]


# Layouts in which no rank has all names.


def pipeline_mesh(is_alone: bool) -> DeviceMesh:
    """One rank after the other, or two groups of ranks where there can be."""
    world = dist.get_world_size()
    return mesh_of(world if is_alone or world % 2 else 2, "pp", "inside")


def _stages(per_rank: int, inside: Callable[[Net, DeviceMesh], nn.Module] | None, model: Net) -> list[nn.Module]:
    """The stages that this rank has of a pipeline, each laid out over ``inside`` of :func:`pipeline_mesh`."""
    mesh = pipeline_mesh(inside is None)
    depth, here = mesh.shape[0], mesh["pp"].get_local_rank()
    count = min(4, per_rank * depth)
    stages = [stage(model, index, count) for index in range(here, count, depth)]
    return stages if inside is None else [inside(part, mesh["inside"]) for part in stages]


def _ddp_inside(model: Net, mesh: DeviceMesh) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())


def _tp_inside(model: Net, mesh: DeviceMesh) -> nn.Module:
    _tensor_parallel(model, mesh)
    return model


def _fsdp1_inside(use_orig_params: bool, model: Net, mesh: DeviceMesh) -> nn.Module:
    options = {"use_orig_params": use_orig_params, "auto_wrap_policy": ModuleWrapPolicy({Block})}
    return FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"), **options)


def _share_experts(model: Net, mesh: DeviceMesh) -> None:
    weight = distribute_tensor(model.experts.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    model.experts.weight = nn.Parameter(weight)


def _ep(model: Net) -> nn.Module:
    _share_experts(model, mesh_of(1, "one", "ep")["ep"])
    return model


def _ep_fsdp(model: Net) -> nn.Module:
    mesh = mesh_of(2, "dp", "ep")
    _share_experts(model, mesh["ep"])
    fully_shard(model.experts, mesh=mesh["dp"], **AVERAGED)
    return _fully_shard(model, mesh_of(1, "one", "all")["all"])


PIPELINES = {
    "pp": functools.partial(_stages, 1, None),
    "interleaved": functools.partial(_stages, 2, lambda model, mesh: model),
    "pp_ddp": functools.partial(_stages, 1, _ddp_inside),
    "pp_fsdp": functools.partial(_stages, 1, _fully_shard),
    "interleaved_fsdp": functools.partial(_stages, 2, _fully_shard),
    "pp_tp": functools.partial(_stages, 1, _tp_inside),
    "interleaved_tp": functools.partial(_stages, 2, _tp_inside),
    "pp_fsdp1_orig": functools.partial(_stages, 1, functools.partial(_fsdp1_inside, True)),
    "interleaved_fsdp1_flat": functools.partial(_stages, 2, functools.partial(_fsdp1_inside, False)),
}
"""Lists of stages of ``torch.distributed.pipelining``."""

APART = {**PIPELINES, "ep": _ep, "ep_fsdp": _ep_fsdp, "zero1": nn.parallel.DistributedDataParallel}


def _is_for_muon(parameter: Tensor) -> bool:
    """Whether Muon steps it: it takes matrices, and where they are sharded each rank must have a row."""
    return parameter.ndim == 2 and len(parameter) > 2


def _muon(parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest; one of them is enough for some stages."""
    matrices = [parameter for parameter in parameters if _is_for_muon(parameter)]
    rest = [parameter for parameter in parameters if not _is_for_muon(parameter)]
    found = [torch.optim.Muon(matrices, lr=1e-2)] if matrices else []
    return [*found, *([torch.optim.AdamW(rest, lr=1e-2, foreach=False)] if rest else [])]


OPTIMIZERS: dict[str, tuple[type, dict[str, object]]] = {
    "fused adamw": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "foreach": False, "momentum": 0.9}),
}
"""Classes of optimizers and their options, by kind; ``muon`` is a list of two."""


def build(
    layout: str, seed: int = 0, dropout: float = 0.0, hidden: int = HIDDEN, kind: str = "fused adamw"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in that layout, the same on every rank, and its optimizer, which has no state yet.

    Of a pipeline both are lists by stage; one optimizer steps all stages of ``interleaved_tp``. Of the kind ``muon``
    there are several for each model or stage.
    """
    torch.manual_seed(seed)
    model = {**LAYOUTS, **APART}[layout](Net(dropout, hidden))
    if kind == "muon":
        parts = model if isinstance(model, list) and layout != "interleaved_tp" else [model]
        return model, [one for part in parts for one in _muon(list(parameters_of(part)))]
    # Tensor and expert parallelism alone leave plain parameters beside DTensors: torch's fused kernels do not take both
    # at once. Those of PyTorch 2.7 take no DTensors on different meshes either.
    mixed = ("tp", "ep", "pp_tp", "interleaved_tp", *(("fsdp_tp", "ep_fsdp") if IS_OLDER else ()))
    make, options = OPTIMIZERS["adamw" if kind == "fused adamw" and layout in mixed else kind]
    if layout == "zero1":
        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, **options)
    if isinstance(model, list) and layout != "interleaved_tp":
        return model, [make(part.parameters(), **options) for part in model]
    return model, make(list(parameters_of(model)), **options)


def parameters_of(model: nn.Module | list[nn.Module]) -> Iterator[nn.Parameter]:
    for part in model if isinstance(model, list) else [model]:
        yield from part.parameters()


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


def plain_names(module: nn.Module | list[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers of a module or of stages by their names without wrappers."""
    if isinstance(module, list):
        return {name: tensor for part in module for name, tensor in plain_names(part).items()}
    module = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _moments(kind: str, parameter: nn.Parameter) -> tuple[str, ...]:
    if kind == "sgd" or (kind == "muon" and _is_for_muon(parameter)):
        return ("momentum_buffer",)
    return ("exp_avg", "exp_avg_sq", "step")


def expected(kind: str = "adamw") -> dict[str, Tensor]:
    """Every tensor of the known state, unsharded, by leaf name."""
    out = {}
    for name, tensor in plain_names(Net()).items():
        out[f"model/{name}"] = known(name, tuple(tensor.shape))
        for moment in _moments(kind, tensor) if isinstance(tensor, nn.Parameter) else ():
            leaf = f"optimizer/state.{name}.{moment}"
            out[leaf] = torch.tensor(7.0) if moment == "step" else known(leaf, tuple(tensor.shape))
    return out


def _kind_of(optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer]) -> str:
    classes = {type(one).__name__ for one in steppers(optimizer)}
    return "muon" if "Muon" in classes else "sgd" if "SGD" in classes else "adamw"


def steppers(optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers that have the state of what this rank steps."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    return [one.optim if isinstance(one, ZeroRedundancyOptimizer) else one for one in optimizers]


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a model and its optimizer's state, by leaf name."""
    names = plain_names(model)
    out = {f"model/{name}": tensor for name, tensor in names.items()}
    for name, parameter in names.items():
        for one in steppers(optimizer):
            for part, value in one.state.get(parameter, {}).items():
                out[f"optimizer/state.{name}.{part}"] = value
    return out


def known_here(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The known state of what a rank has: its stages, and what its optimizers step."""
    numbers = expected(_kind_of(optimizer))
    if not isinstance(model, list) and not isinstance(optimizer, ZeroRedundancyOptimizer):
        return numbers
    if flat := _fsdp1_of(model, optimizer):
        return {name: numbers[name] for pair in flat for name in whole_of_stage(*pair)}
    names = plain_names(model)
    stepped = {id(p) for one in steppers(optimizer) for group in one.param_groups for p in group["params"]}
    here = {f"model/{name}": numbers[f"model/{name}"] for name in names}
    for name, parameter in names.items():
        if id(parameter) in stepped:
            prefix = f"optimizer/state.{name}."
            here |= {leaf: number for leaf, number in numbers.items() if leaf.startswith(prefix)}
    return here


def fill(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer's state and puts the known numbers everywhere."""
    for parameter in parameters_of(model):
        parameter.grad = torch.zeros_like(parameter)
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        one.step()
        one.zero_grad()
    numbers = expected(_kind_of(optimizer))
    flat = _fsdp1_of(model, optimizer)
    for wrapped, its in flat:
        (_fill_stage if isinstance(model, list) else _fill_fsdp1)(wrapped, its, numbers)
    if not flat:
        for name, tensor in held(model, optimizer).items():
            local(tensor).copy_(mine(numbers[name], tensor))


def differing(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the tensors that are not the known ones, bit by bit, in the rank's part of them; or are not there."""
    if flat := _fsdp1_of(model, optimizer):
        whole_of = whole_of_stage if isinstance(model, list) else whole_of_fsdp1
        whole = {name: tensor for pair in flat for name, tensor in whole_of(*pair).items()}
        numbers = known_here(model, optimizer)
        return [name for name in numbers | whole if not same_bits(numbers.get(name, torch.tensor(())), whole[name])]
    numbers = known_here(model, optimizer)
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


def _fsdp1_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """The modules that are under FSDP1 with their optimizers: the model, or its stages."""
    if not any(isinstance(part, FullyShardedDataParallel) for part in (model if isinstance(model, list) else [model])):
        return []
    return list(zip(model, optimizer, strict=True)) if isinstance(model, list) else [(model, optimizer)]


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


# PyTorch's full state dicts of optimizers want rank 0 of the job in the group of FSDP1, which has no part in most
# stages. There moments stand in for parameters, in full state dicts of the model.


def whole_of_stage(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """As :func:`whole_of_fsdp1`, of a stage."""
    parameters = [parameter for parameter in model.parameters() if parameter.numel()]
    names = {name for name, _ in Net().named_parameters()}
    with _full(model), torch.no_grad():
        tensors = {f"model/{name}": tensor.clone() for name, tensor in model.state_dict().items()}
        present = [parameter.clone() for parameter in parameters]
        for moment in ("exp_avg", "exp_avg_sq"):
            for parameter in parameters:
                parameter.copy_(optimizer.state[parameter][moment])
            whole = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in names}
            tensors |= {f"optimizer/state.{name}.{moment}": tensor for name, tensor in whole.items()}
        for parameter, number in zip(parameters, present, strict=True):
            parameter.copy_(number)
    (step,) = {float(optimizer.state[parameter]["step"]) for parameter in parameters}
    return tensors | {f"optimizer/state.{name}.step": torch.tensor(step) for name in whole}


def _fill_stage(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: dict[str, Tensor]) -> None:
    with _full(model), torch.no_grad():
        whole = model.state_dict()
        for moment in ("exp_avg", "exp_avg_sq"):
            model.load_state_dict(
                {name: numbers.get(f"optimizer/state.{name}.{moment}", whole[name]) for name in whole}
            )
            for parameter in model.parameters():
                optimizer.state[parameter][moment].copy_(parameter)
        model.load_state_dict({name: numbers[f"model/{name}"] for name in whole})
    for parameter in model.parameters():
        optimizer.state[parameter]["step"].fill_(7.0)


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The plain tensors in which a rank's part of a state lies."""
    tensors = list(parameters_of(model))
    tensors += [buffer for part in (model if isinstance(model, list) else [model]) for buffer in part.buffers()]
    for one in steppers(optimizer):
        tensors += [value for parts in one.state.values() for value in parts.values()]
    return list(map(local, tensors))


def is_drawn(loading: int, saved: int) -> bool:
    """Whether this pair of layouts is tried: each that loads, and each that was saved, is in some."""
    return (loading + saved) % PAIRS_ONE_IN == 0


def spoil(model: nn.Module, optimizer: torch.optim.Optimizer, *, keeps_state: bool) -> None:
    """Changes every number of a state, for a load to put right; or drops what the optimizer holds."""
    for tensor in memory(model, optimizer):
        tensor.add_(1)
    for one in [] if keeps_state else steppers(optimizer):
        one.state.clear()
