"""Every class of ``torch.optim`` and ``torch.distributed.optim`` in every layout: what is loaded, there and over other
layouts, trains on as a training that was not interrupted, bit for bit; or a save or load refuses it by name."""

import inspect
import os

import shardfast as sf
import torch
import torch.distributed as dist
from layouts import APART, LAYOUTS, build, local, parameters_of, same_bits, steppers
from torch.distributed import optim as distributed
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

CASES_ONE_IN = int(os.environ.get("SHARDFAST_OPTIMIZERS_ONE_IN", "0"))
"""One in so many pairs of a class and a layout; 0 for each layout once, and each class."""

WORLD = 4
EVERYWHERE = [*LAYOUTS, *APART]

OPTIONS = {
    "Adam": {"amsgrad": True},
    "ASGD": {"t0": 1, "lambd": 0.1},
    "LBFGS": {"max_iter": 2},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
}
"""What makes classes keep more state."""

ALONE = {name for name, kind in vars(torch.optim).items() if inspect.isclass(kind) and issubclass(kind, Optimizer)}
AROUND = {"PostLocalSGDOptimizer", "ZeroRedundancyOptimizer", "_NamedOptimizer"}
NOT_TRIED = {
    "Optimizer": "the base of the others, which does not step",
    "DistributedOptimizer": "steps parameters of other processes by RPC, and has no state_dict()",
}
CLASSES = sorted((ALONE | AROUND) - NOT_TRIED.keys())
JOB_WIDE = ("PostLocalSGDOptimizer", "ZeroRedundancyOptimizer")
"""Classes whose steps send whole parameters to all ranks, so each rank must have all of them."""

WHOLE = ("plain", "ddp", "fsdp1_no_shard_orig", "fsdp1_no_shard_flat")
LIMITED = (*JOB_WIDE, "Adafactor", "LBFGS", "Muon")
"""Classes that step in few layouts: in a usual run, also in one in which they do."""

ONE_GROUP = ("LBFGS", "Muon", "PostLocalSGDOptimizer", "ZeroRedundancyOptimizer", "_NamedOptimizer")


def test_the_table_has_every_class():
    found = {
        name
        for name, kind in vars(distributed).items()
        if inspect.isclass(kind) and (issubclass(kind, Optimizer) or name in distributed.__all__)
    }
    assert found <= AROUND | NOT_TRIED.keys()


# One training


def made_for(name, module):
    """An optimizer of that class for a module or a stage."""
    parameters = list(module.parameters())
    if name == "ZeroRedundancyOptimizer":
        return distributed.ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, lr=0.1)
    if name == "PostLocalSGDOptimizer":
        sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return distributed.PostLocalSGDOptimizer(sgd, PeriodicModelAverager(period=2, warmup_steps=0))
    if name == "_NamedOptimizer":
        return distributed._NamedOptimizer(module.named_parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    if name == "Muon":
        parameters = [parameter for parameter in parameters if parameter.ndim == 2]
    made = getattr(torch.optim, name)
    if name in ONE_GROUP:
        return made(parameters, **OPTIONS.get(name, {}))
    bias = [parameter for parameter in parameters if parameter.ndim < 2]
    rest = [parameter for parameter in parameters if parameter.ndim >= 2]
    groups = [{"params": group, "lr": rate} for group, rate in ((rest, 0.1), (bias, 0.05)) if group]
    return made(groups, **{**OPTIONS.get(name, {}), "lr": 0.1})


def training(name, layout, seed=0):
    model, _ = build(layout, seed)
    if layout == "zero1":
        parameters = [p for p in model.parameters() if name != "Muon" or p.ndim == 2]
        inside = getattr(torch.optim, name)
        return model, distributed.ZeroRedundancyOptimizer(
            parameters, optimizer_class=inside, **{"lr": 0.1, **OPTIONS.get(name, {})}
        )
    if isinstance(model, list):
        return model, [made_for(name, part) for part in model]
    return model, made_for(name, model)


def gradient(parameter, number, is_sparse):
    """A function of each element, so that all replicas and layouts have the same."""
    found = torch.sin(local(parameter) * 3 + number)
    if padding(parameter):
        found[-padding(parameter) :] = 0
    if isinstance(parameter, DTensor):
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(
            found, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
        )
    return found.to_sparse() if is_sparse else found


def step(model, optimizer, numbers):
    every = optimizer if isinstance(optimizer, list) else [optimizer]

    def closure(number):
        for parameter in parameters_of(model):
            is_sparse = any("SparseAdam" in type(one).__name__ for one in steppers(every))
            parameter.grad = gradient(parameter, number, is_sparse)
        return torch.tensor(1.0 / (number + 1))

    for number in numbers:
        closure(number)
        for one in every:
            one.step(lambda number=number: closure(number)) if isinstance(one, torch.optim.LBFGS) else one.step()


def held(model, optimizer):
    """All that a rank has, in an order that is the same for equal trainings."""
    found = [copied(local(parameter), padding(parameter)) for parameter in parameters_of(model)]
    for one in steppers(optimizer):
        inside = one.optim if hasattr(one, "optim") else one
        for group in inside.param_groups:
            found.append({name: value for name, value in group.items() if name not in ("params", "param_names")})
            # What a rank holds nothing of has nothing to save, though PyTorch counts its steps.
            own = [parameter for parameter in group["params"] if parameter.numel()]
            found += [copied(inside.state.get(parameter, {}), padding(parameter)) for parameter in own]
    return found


def padding(parameter):
    """Elements at the end of a shard of FSDP1's flat parameter that belong to no parameter."""
    return getattr(parameter, "_shard_numel_padded", 0)


def copied(value, cut=0):
    if isinstance(value, torch.Tensor):
        # State of another shape than its parameter may come back on other placements.
        whole = value.full_tensor() if isinstance(value, DTensor) else value.detach()
        return whole[:-cut].clone() if cut and value.ndim else whole.clone()
    if isinstance(value, dict):
        return {name: copied(one, cut) for name, one in value.items()}
    return [copied(one, cut) for one in value] if isinstance(value, (list, tuple)) else value


def same(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


# A case


class Refused(Exception):
    """A save or load has refused, by name."""


def together(call):
    """Calls on each rank; what one rank raises of PyTorch's is an error on all, so that none waits for it."""
    error, result = None, None
    try:
        result = call()
    except Exception as raised:
        error = raised
    failed = torch.tensor(float(error is not None))
    dist.all_reduce(failed)
    if failed:
        raise RuntimeError("a rank failed") if error is None else error
    return result


def state_of(pair):
    return {"model": pair[0], "optimizer": pair[1]}


def refusing(verb, url, pair):
    try:
        verb(url, state_of(pair))
    except sf.Error as error:
        assert "optimizer" in str(error) or "model: " in str(error), error
        raise Refused(str(error)) from error


def can_step(name, layout):
    """Whether PyTorch can step that class there."""
    if name in JOB_WIDE and layout not in WHOLE:
        return False
    try:
        together(lambda: step(*training(name, layout), range(2)))
    except Exception:
        return False
    return True


def verdict(name, layout, others, url):
    """Saves, loads into the same layout and over other ones; the number of refusals and of layouts gone over."""
    refused, passed = 0, 0
    first = training(name, layout)
    step(*first, range(2))
    before = held(*first)
    try:
        refusing(sf.save, f"{url}/first", first)
    except Refused:
        return 1, 0
    places = [f"{url}/first"]
    for other in others:
        if not can_step(name, other):
            continue
        over = training(name, other, 1)
        try:
            refusing(sf.load, f"{url}/first", over)
            refusing(sf.save, f"{url}/{other}", over)
        except Refused:
            refused += 1
            continue
        step(*over, range(2, 4))
        places.append(f"{url}/{other}")
    again = []
    for place in places:
        for is_stepped in (False, True):
            into = training(name, layout, 2)
            if is_stepped:
                step(*into, range(5, 6))
            try:
                refusing(sf.load, place, into)
            except Refused:
                assert place != places[0] or is_stepped, "a layout refuses what it saved itself"
                refused += 1
                continue
            assert same(before, held(*into)), (name, layout, place)
            again.append(into)
            passed += 1
    step(*first, range(2, 4))
    after = held(*first)
    for into in again:
        step(*into, range(2, 4))
        assert same(after, held(*into)), (name, layout, "two steps later")
    return refused, passed


def cases():
    """Classes and layouts, each with two other layouts."""
    every = []
    for row, name in enumerate(CLASSES):
        for column, layout in enumerate(EVERYWHERE):
            others = [EVERYWHERE[(column + distance + row) % len(EVERYWHERE)] for distance in (1, 7)]
            others = [other for other in others if other != layout]
            is_usual = column % len(CLASSES) == row or (name in LIMITED and layout == "ddp")
            if (row * 7 + column) % CASES_ONE_IN == 0 if CASES_ONE_IN else is_usual:
                every.append((name, layout, others if CASES_ONE_IN else others[:1]))
    return every


def check_all(rank, world, url):
    found = {}
    for number, (name, layout, others) in enumerate(cases()):
        if can_step(name, layout):
            found[name, layout] = verdict(name, layout, others, f"{url}/{number}")
    return found


def test_every_optimizer_trains_on_after_a_load_in_every_layout_or_is_refused_by_name(ranks, tmp_path):
    found, *_ = ranks(WORLD, deadline_s=240.0 if not CASES_ONE_IN else 3000.0)(check_all, f"{tmp_path}")
    passed = {pair for pair, (_, count) in found.items() if count}
    assert len(passed) > 0.5 * len(found), found
