"""Tensors that wrap others and name them: the inner ones are saved and filled, what the class needs beside is compared.

The class here has what torchao's have: codes by element, one scale for each block of elements, and a dtype.
"""

import copy

import pytest
import shardfast as sf
import torch
from shardfast.adapters.torch import wrapped as torch_wrapped
from shardfast.adapters.torch.placement import Placed
from shardfast.state.catalog import Refused, Region
from shardfast.state.description import Describer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import return_and_correct_aliasing

BLOCK = 8


class Coded(torch.Tensor):
    """Numbers as whole numbers, with one scale for each block."""

    @staticmethod
    def __new__(cls, codes, scale, label):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale, label):
        self.codes, self.scale, self.label = codes, scale, label

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.label, torch.float32]

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size=None, stride=None):
        return cls(inner["codes"], inner["scale"], context[0])

    def numbers(self):
        return (self.codes.float().view(-1, BLOCK) * self.scale.view(-1, 1)).view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        aten = torch.ops.aten
        if function in (aten.detach.default, aten.alias.default, aten.view.default):
            made = cls(args[0].codes, args[0].scale, args[0].label)
            return return_and_correct_aliasing(function, args, kwargs or {}, made)
        unwrapped = [one.numbers() if isinstance(one, cls) else one for one in args]
        return function(*unwrapped, **(kwargs or {}))

    @staticmethod
    def of(numbers, label="a"):
        blocks = numbers.reshape(-1, BLOCK)
        scale = blocks.abs().amax(1).clamp(min=1e-12) / 127
        codes = (blocks / scale.view(-1, 1)).round().to(torch.int8).view(numbers.shape)
        return Coded(codes, scale, label)


class Momentum(torch.optim.Optimizer):
    """Keeps its momentum coded."""

    def __init__(self, parameters, label="a"):
        super().__init__(parameters, {"lr": 0.1})
        self.label = label

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                if not state:
                    coded = Coded.of(torch.zeros_like(local), self.label)
                    is_sharded = isinstance(parameter, DTensor)
                    mesh = parameter.device_mesh if is_sharded else None
                    state["momentum"] = (
                        DTensor.from_local(coded, mesh, parameter.placements, run_check=False) if is_sharded else coded
                    )
                coded = state["momentum"]
                coded = coded._local_tensor if isinstance(coded, DTensor) else coded
                new = Coded.of(coded.numbers() * 0.9 + grad, self.label)
                coded.codes.copy_(new.codes)
                coded.scale.copy_(new.scale)
                local.sub_(group["lr"] * coded.numbers())


def made(seed, label="a"):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    return model, Momentum(model.parameters(), label)


def losses(model, optimizer, steps):
    found = []
    for step in range(steps):
        loss = model(torch.full((3, 16), (step + 1) / 7)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def state_of(model, optimizer):
    return {"model": model, "optimizer": optimizer}


def test_what_is_inside_comes_back(tmp_path):
    model, optimizer = made(0)
    losses(model, optimizer, 1)
    sf.save(tmp_path / "zero", state_of(model, optimizer))  # describes the state, also for the next save
    losses(model, optimizer, 2)
    kept = copy.deepcopy([(one["momentum"].codes, one["momentum"].scale) for one in optimizer.state.values()])
    pending = sf.save_async(tmp_path / "one", state_of(model, optimizer))
    expected = losses(model, optimizer, 4)
    pending.committed()
    into = made(1)
    losses(*into, 1)
    plan = sf.load(tmp_path / "one", state_of(*into))
    assert {"optimizer/state.0.weight.momentum.codes", "optimizer/state.0.weight.momentum.scale"} <= set(plan.tensors)
    for (codes, scale), one in zip(kept, into[1].state.values(), strict=True):
        assert torch.equal(one["momentum"].codes, codes)
        assert torch.equal(one["momentum"].scale, scale)
    assert losses(*into, 4) == expected


def check_described_once(model, optimizer):
    describer, state = Describer(lambda by: None), state_of(model, optimizer)

    def values(described):
        return sorted(value.encoded() for value in described.values)

    losses(model, optimizer, 1)
    first = describer.describe(state, pickle=False)
    for _ in range(2):
        losses(model, optimizer, 1)
        again = describer.describe(state, pickle=False)
        assert again.described is first.described
        assert values(again) == values(first)
    wrapping = optimizer.state[model[0].weight]["momentum"]
    wrapping = wrapping._local_tensor if isinstance(wrapping, DTensor) else wrapping
    wrapping.label = "other"  # a value of the state
    again = describer.describe(state, pickle=False)
    assert again.described is first.described
    assert values(again) == values(Describer(lambda by: None).describe(state, pickle=False)) != values(first)
    wrapping.scale = wrapping.scale.clone()
    assert describer.describe(state, pickle=False).described is not first.described


def test_what_wraps_others_is_described_once():
    model, optimizer = made(0)
    model.coded = nn.Parameter(Coded.of(torch.ones(2, BLOCK)), requires_grad=False)
    check_described_once(model, optimizer)
    describer = Describer(lambda by: None)
    first = describer.describe({"model": model}, pickle=False)
    assert describer.describe({"model": model}, pickle=False).described is first.described
    model.coded.codes = model.coded.codes.clone()
    assert describer.describe({"model": model}, pickle=False).described is not first.described


def test_what_an_optimizer_steps_inside_of_a_tensor_is_captured_lazily():
    model = nn.Linear(64, 64)
    optimizer = Momentum(model.parameters())
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    describer, inside = Describer(lambda by: None), "optimizer/state.weight.momentum"
    for _ in range(2):
        described = describer.describe(state_of(model, optimizer), pickle=False)
        places = [place for one in described.watched for place in one.places]
        assert sorted(places) == ["model/weight", f"{inside}.codes", f"{inside}.scale"]
    optimizer.step()
    assert [len(one.changes()) for one in described.watched] == [len(one.places) for one in described.watched]


def test_a_load_makes_no_wrapping_tensor(tmp_path):
    model, optimizer = made(0)
    losses(model, optimizer, 1)
    sf.save(tmp_path / "one", state_of(model, optimizer))
    with pytest.raises(sf.Invalid, match=r"momentum\.codes: it is part of a tensor that wraps others.*step the"):
        sf.load(tmp_path / "one", state_of(*made(1)))


def test_what_a_class_was_made_with_is_compared(tmp_path):
    model, optimizer = made(0)
    losses(model, optimizer, 1)
    sf.save(tmp_path / "one", state_of(model, optimizer))
    into = made(1, label="b")
    losses(*into, 1)
    with pytest.raises(sf.Invalid, match=r"momentum\.constants: the checkpoint holds .*'a'.*made as .*'b'"):
        sf.load(tmp_path / "one", state_of(*into))


def test_weights_that_are_coded_come_back(tmp_path):
    def coded(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8))
        model[0].weight = nn.Parameter(Coded.of(model[0].weight.detach()), requires_grad=False)
        return model

    model = coded(0)
    sf.save(tmp_path / "one", {"model": model})
    into = coded(1)
    sf.load(tmp_path / "one", {"model": into})
    assert torch.equal(into[0].weight.codes, model[0].weight.codes)
    assert torch.equal(into[0].weight.scale, model[0].weight.scale)
    assert torch.equal(into[1].weight, model[1].weight)


class Derives(nn.Module):
    """Has its weight plain, and coded in its state dict."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, BLOCK), requires_grad=False)
        self.taken = None

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"] = Coded.of(self.weight.detach())

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.taken = state_dict[f"{prefix}weight"]
        self.weight.copy_(self.taken.numbers())


def test_what_a_state_dict_makes_of_it_is_given_back(tmp_path):
    model, into = Derives(0), Derives(1)
    sf.save(tmp_path / "one", {"model": model})
    sf.load(tmp_path / "one", {"model": into})
    expected = Coded.of(model.weight)
    assert torch.equal(into.taken.codes, expected.codes) and torch.equal(into.taken.scale, expected.scale)
    assert torch.equal(into.weight, expected.numbers())


class Hides(nn.Linear):
    """Has numbers in its state dict that it does not take from one."""

    def __init__(self, number):
        super().__init__(2, 2)
        self.number = number

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.number"] = torch.tensor(self.number)


def test_what_a_module_does_not_take_is_refused(tmp_path):
    model = nn.ModuleDict({"layer": Hides(3)})
    sf.save(tmp_path / "one", {"model": model})
    same = nn.ModuleDict({"layer": Hides(3)})
    sf.load(tmp_path / "one", {"model": same})
    assert torch.equal(same["layer"].weight, model["layer"].weight)
    said = r"model: layer\.weight\.number is in its state_dict\(\), but its load_state_dict\(\) does not take it"
    with pytest.raises(sf.Invalid, match=said):
        sf.load(tmp_path / "one", {"model": nn.ModuleDict({"layer": Hides(4)})})


@pytest.mark.parametrize(
    "known",
    [
        torch_wrapped._Known({"codes": "element"}),
        torch_wrapped._Known({"codes": "element", "scale": "block"}, lambda context: {"other": context["other"]}),
        torch_wrapped._Known({"codes": "element", "scale": "block"}, lambda context: {"other": context[7]}),
    ],
)
def test_a_class_of_another_version_is_refused(tmp_path, monkeypatch, known):
    monkeypatch.setitem(torch_wrapped._KNOWN, f"{__name__}.Coded", known)
    model = nn.Linear(8, 4)
    model.weight = nn.Parameter(Coded.of(model.weight.detach()), requires_grad=False)
    with pytest.raises(sf.Invalid, match=r"weight: a \S+Coded that names .*'scale'.* not what is known of this class"):
        sf.save(tmp_path / "one", {"model": model})


@pytest.mark.parametrize("dim", [0, 1])
def test_several_boxes_are_rows_or_refused(dim):
    """As a strided shard leaves them: two runs of the dimension."""
    starts, lengths = ((0, 4), (2, 8)) if dim == 0 else ((0, 4), (8, 2))
    regions = tuple(Region((first, 0) if dim == 0 else (0, first), lengths) for first in starts)
    local = (4, 8) if dim == 0 else (8, 4)
    there = Placed((8, 8), regions, ((0, 0), (2, 0) if dim == 0 else (0, 2)), local, "", None)
    codes = torch.zeros(local)
    if dim == 0:
        part = torch_wrapped._part("codes", "element", codes, codes, there)
        assert part.regions == regions and part.tensor is codes
    else:
        with pytest.raises(Refused, match=r"its 'codes' has shape \(8, 4\) for a shard"):
            torch_wrapped._part("codes", "element", codes, codes, there)


@pytest.mark.parametrize(
    ("rows", "first", "length", "counts", "found"),
    [
        (8, 4, 4, (2, 2), ((4, 2), Region((2, 0), (2, 2)))),
        (8, 3, 4, (2, 2), None),  # begins within a box
        (7, 4, 3, (2, 2), None),  # boxes of no one length
        (7, 4, 2, (1, 2), None),  # the whole tensor ends within a box
        (8, 4, 4, (2, 2, 1), None),
    ],
)
def test_blocks_that_are_boxes(rows, first, length, counts, found):
    there = Placed((rows, 6), (Region((first, 0), (length, 6)),), ((0, 0),), (length, 6), "", None)
    scale = torch.zeros(counts)
    if found is not None:
        part = torch_wrapped._part("scale", "block", scale, torch.zeros(length, 6), there)
        assert (part.shape, part.regions) == (found[0], (found[1],))
    else:
        with pytest.raises(Refused, match=r"its 'scale' has shape"):
            torch_wrapped._part("scale", "block", scale, torch.zeros(length, 6), there)


def sharded(seed, world):
    model, _ = made(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, Momentum(model.parameters())


def check_sharded(rank, world, url):
    model, optimizer = sharded(0, world)
    losses(model, optimizer, 2)
    with pytest.raises(sf.Invalid, match=r"momentum: a DTensor of \S+Coded, a class that wraps other tensors"):
        sf.save(f"{url}/none", state_of(model, optimizer))
    kinds = {"codes": "element", "scale": "block"}
    torch_wrapped._KNOWN[f"{__name__}.Coded"] = torch_wrapped._Known(kinds, lambda context: {"context": context})
    check_described_once(*sharded(0, world))
    sf.save(f"{url}/two", state_of(model, optimizer))
    expected = losses(model, optimizer, 3)
    into = sharded(1, world)
    losses(*into, 1)
    sf.load(f"{url}/two", state_of(*into))
    assert losses(*into, 3) == expected
    into = sharded(2, world)
    losses(*into, 1)
    sf.load(f"{url}/one", state_of(*into))  # that of one rank
    for parameter, state in into[1].state.items():
        coded, shard = state["momentum"]._local_tensor, parameter.placements
        assert shard == (Shard(0),)
        whole = torch.load(f"{url}/whole-{tuple(parameter.shape)}.pt")
        rows = parameter.shape[0] // world
        assert torch.equal(coded.codes, whole["codes"][rank * rows : (rank + 1) * rows])
        scale = whole["scale"].view(world, -1)[rank]
        assert torch.equal(coded.scale, scale)
    # A block of a shard that begins within a block of the whole tensor.
    state = next(state for parameter, state in optimizer.state.items() if parameter.ndim == 2)
    coded = state["momentum"]._local_tensor
    coded.scale = torch.ones(5)
    with pytest.raises(sf.Invalid, match=r"its 'scale' has shape \(5,\).*blocks that do not end where shards do"):
        sf.save(f"{url}/none", state_of(model, optimizer))
    model = FullyShardedDataParallel(made(0)[0], use_orig_params=True, device_id=torch.device("cpu"))
    flat = next(parameter for parameter in model.parameters() if parameter.numel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[flat]["momentum"] = Coded.of(torch.ones(BLOCK))
    with pytest.raises(sf.Invalid, match=r"momentum is a Coded, which wraps other tensors, and its parameter is"):
        sf.save(f"{url}/none", state_of(model, optimizer))


def test_shards_are_cut_where_blocks_end(ranks, tmp_path):
    model, optimizer = made(0)
    losses(model, optimizer, 2)
    sf.save(tmp_path / "one", state_of(model, optimizer))
    for parameter, state in optimizer.state.items():
        inner = {"codes": state["momentum"].codes, "scale": state["momentum"].scale}
        torch.save(inner, tmp_path / f"whole-{tuple(parameter.shape)}.pt")
    ranks(2)(check_sharded, f"{tmp_path}")
    into = made(3)
    losses(*into, 1)
    sf.load(tmp_path / "two", state_of(*into))
    assert all(state["momentum"].codes.any() for state in into[1].state.values())
