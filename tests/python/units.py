"""A model of a few units, wrapped in the ways that PyTorch's own tests wrap theirs, and what PyTorch gathers of it."""

import functools
import itertools

import torch
import torch.distributed as dist
from layouts import known, same_bits, whole_of_fsdp1
from older import AVERAGED
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

WIDTH = 6


class Unit(nn.Module):
    """What is wrapped by itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + F.gelu(self.linear(x)) * self.gain


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Unit(), Unit(), Unit()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, step=0):
        return self.head(self.third(self.second(self.first(x))))


# Layouts


def units_of(net):
    return [unit for unit in net.children() if isinstance(unit, Unit)]


def wrap_fsdp1(layout, net):
    options = {"use_orig_params": "flat" not in layout, "device_id": torch.device("cpu")}
    strategies = itertools.repeat(ShardingStrategy.FULL_SHARD)
    if "strategies" in layout:
        kinds = ("SHARD_GRAD_OP", "NO_SHARD", "FULL_SHARD")
        strategies = itertools.cycle(ShardingStrategy[kind] for kind in kinds)
    for unit, strategy in zip([] if "root" in layout else units_of(net), strategies, strict=False):
        wrapped = FSDP(unit, sharding_strategy=strategy, **options)
        wrapped = FSDP(wrapped, **options) if "twice" in layout else wrapped
        for name in [name for name, child in net._modules.items() if child is unit]:
            setattr(net, name, wrapped)
    return net if "inner" in layout else FSDP(net, **options)


def wrap_fsdp2(layout, net, **options):
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), **AVERAGED, **options}
    if "columns" in layout:
        options["shard_placement_fn"] = lambda parameter: Shard(parameter.ndim - 1)
    if "offload" in layout:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if "gathered" in layout:
        options["reshard_after_forward"] = False
    for unit in units_of(net):
        fully_shard(unit, **options)
    return fully_shard(net, **options)


def wrap(layout, net):
    """The model in a layout: ``plain``, ``ddp``, or a kind of FSDP with what is said behind it."""
    if "recomputed" in layout:
        for unit in units_of(net):
            unit.linear = checkpoint_wrapper(unit.linear)
    if layout.startswith("ddp"):
        net = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    elif layout.startswith("fsdp1"):
        net = wrap_fsdp1(layout, net)
    elif layout.startswith("fsdp2"):
        net = wrap_fsdp2(layout, net)
    return torch.compile(net, backend="eager") if "compiled" in layout else net


def bare(model):
    """Without the wrappers around the whole model; what is inside keeps its own."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, (nn.parallel.DistributedDataParallel, FSDP)) else model


def adamw(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, foreach=False)


def train(model, optimizer, steps):
    """On the same numbers everywhere, so that copies stay the same."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    for step in steps:
        model(known(f"x{step}", (5, WIDTH)).to(dtype), step).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")


def clean(name):
    return functools.reduce(lambda left, wrapper: left.replace(wrapper, ""), WRAPPERS, name)


def whole_of(model, optimizer=None):
    """Every tensor of a model and its optimizer, gathered by PyTorch, by leaf name."""
    model = getattr(model, "_orig_mod", model)
    optimizer = adamw(model) if optimizer is None else optimizer
    if any(isinstance(part, FSDP) for part in model.modules()):
        tensors = whole_of_fsdp1(model, optimizer)
    else:
        tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            state = optimizer.state.get(parameter, {})
            tensors |= {f"optimizer/state.{name}.{part}": value for part, value in state.items()}
    tensors = {clean(name): tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    with torch.no_grad():
        return {
            name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()
        }


def unequal(one, other):
    return [name for name in one.keys() | other.keys() if name not in one or name not in other] + [
        name for name in one.keys() & other.keys() if not same_bits(one[name], other[name])
    ]


def state_of(model, optimizer):
    return {"model": model, "optimizer": optimizer}
