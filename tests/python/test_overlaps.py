"""A load writes each element once: destinations that lie over each other are one, are made anew, or are refused."""

import random

import numpy as np
import pytest
import shardfast as sf
import torch
from shardfast.state.catalog import Box
from shardfast.state.overlaps import overlaps
from torch import nn


def box_of(array):
    return Box("host", array.ctypes.data, array.shape, array.strides, array.itemsize)


def drawn(dice, memory):
    """A view of a part of ``memory``, in any order of its dimensions, with steps and backwards."""
    view = memory.reshape(dice.choice([(64, 90), (8, 8, 90), (5760,), (10, 16, 36), (2, 30, 96)]))
    view = view.transpose(dice.sample(range(view.ndim), view.ndim))
    for axis in range(view.ndim):
        first, last = sorted(dice.sample(range(view.shape[axis] + 1), 2))
        step = dice.choice([1, 1, 2, 3, -1])
        index = [slice(None)] * view.ndim
        index[axis] = slice(first, last, step) if step > 0 else slice(last - 1, first - 1 if first else None, step)
        view = view[tuple(index)]
    return view.view(np.int16)[..., ::2] if view.flags.c_contiguous and dice.random() < 0.2 else view


@pytest.mark.parametrize("seed", range(40))
def test_pairs_are_those_that_share_a_byte(seed):
    dice = random.Random(seed)
    memory = np.zeros(5760, dtype=np.int32)
    seen = 0
    for _ in range(40):
        views = [drawn(dice, memory) for _ in range(dice.randint(2, 5))]
        marks = []
        for view in views:
            memory.fill(0)
            view.fill(-1)
            marks.append(memory.view(np.uint8) != 0)
        memory.fill(0)
        expected = {(i, j) for j in range(len(views)) for i in range(j) if (marks[i] & marks[j]).any()}
        found = {tuple(sorted(pair)) for pair in overlaps([box_of(view) for view in views])}
        assert found == expected
        seen += len(expected)
    assert seen, "some meet"


def test_devices_do_not_meet():
    one = Box("host", 64, (4,), (4,), 4)
    assert list(overlaps([one, one._replace(space="device")])) == []
    assert list(overlaps([one, one])) == [(0, 1)]


def refused(url, state, said, **how):
    before = {name: value.clone() for name, value in state["t"].items()}
    with pytest.raises(sf.Invalid, match=said):
        sf.load(url, state, **how)
    assert all(torch.equal(value, before[name]) for name, value in state["t"].items()), "nothing was written"


def test_leaves_that_overlap_in_part_are_refused(tmp_path):
    sf.save(tmp_path / "a", {"t": {"x": torch.arange(10.0), "y": torch.arange(100.0, 110.0)}})
    said = r"overlap: t/\w and t/\w lie over each other in memory here, .*\n.*clone\(\) one of them"
    flat = torch.zeros(20)
    for strict in (True, False):
        refused(tmp_path / "a", {"t": {"x": flat[:10], "y": flat[5:15]}}, said, strict=strict)
    refused(tmp_path / "a", {"t": {"x": flat[:10], "y": flat.view(torch.int32).view(torch.float32)[9:19]}}, said)
    refused(tmp_path / "a", {"t": {"x": flat[::2], "y": flat[:10]}}, said)
    state = {"t": {"x": flat[::2], "y": flat[1::2]}}
    sf.load(tmp_path / "a", state)
    assert torch.equal(state["t"]["x"], torch.arange(10.0)) and state["t"]["y"][9] == 109


class Attention(nn.Module):
    def __init__(self, is_view):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(12, 4))
        self.register_buffer("query", self.qkv.data[:4] if is_view else torch.zeros(4, 4))


def test_a_buffer_that_views_a_parameter_is_refused_where_both_were_saved(tmp_path):
    sf.save(tmp_path / "a", {"m": Attention(False)})
    with pytest.raises(sf.Invalid, match=r"overlap: m/qkv and m/query lie over each other"):
        sf.load(tmp_path / "a", {"m": Attention(True)})
    into = Attention(True)
    plan = sf.load(tmp_path / "a", {"m": into}, only="m/qkv")
    assert plan.tensors == ["m/qkv"]


def net(seed):
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


@pytest.mark.parametrize("beside", [{"decay": 0.5}, {}])
def test_an_average_that_begins_as_the_model_itself_does_not_overwrite_it(tmp_path, beside):
    def shadow_of(model):
        return {**beside, **{name: value.detach() for name, value in model.state_dict().items()}}

    model = net(0)
    average = shadow_of(model)
    average.update({name: value + 1 for name, value in model.state_dict().items()})
    sf.save(tmp_path / "a", {"model": model, "average": average})
    into = net(1)
    shadow = shadow_of(into)
    if beside:
        sf.load(tmp_path / "a", {"model": into, "average": shadow})
        assert torch.equal(into.weight, model.weight) and torch.equal(shadow["weight"], average["weight"])
        return
    for strict in (True, False):  # a dict of tensors is filled in place
        with pytest.raises(sf.Invalid, match=r"overlap: .*weight .* are one tensor here and two in the checkpoint"):
            sf.load(tmp_path / "a", {"model": into, "average": shadow}, strict=strict)


@pytest.mark.parametrize("count", [1, 300_000])
def test_values_that_begin_as_one_tensor_become_two(tmp_path, count):
    best, last = torch.ones(count), torch.full((count,), 2.0)
    sf.save(tmp_path / "a", {"extra": {"all": {"best": best, "last": last, "epoch": 3}}})
    zero = torch.zeros(count)
    state = {"extra": {"all": {"best": zero, "last": zero, "epoch": 0}}}
    sf.load(tmp_path / "a", state)
    assert torch.equal(state["extra"]["all"]["best"], best) and torch.equal(state["extra"]["all"]["last"], last)
    alone = {"extra": {"all": {"best": torch.zeros(count), "last": torch.zeros(count), "epoch": 0}}}
    kept = alone["extra"]["all"]["best"]
    sf.load(tmp_path / "a", alone)
    assert alone["extra"]["all"]["best"] is kept, "filled in place where it is alone"


class Shadow:
    def __init__(self, model):
        self.shadow = {name: value.detach() for name, value in model.state_dict().items()}

    def state_dict(self):
        return {"shadow": self.shadow, "decay": 0.5}

    def load_state_dict(self, said):
        self.shadow = said["shadow"]


def test_what_an_object_gets_is_its_own(tmp_path):
    model = net(0)
    average = Shadow(model)
    average.shadow = {name: value + 1 for name, value in average.shadow.items()}
    sf.save(tmp_path / "a", {"model": model, "average": average})
    into = net(1)
    other = Shadow(into)
    sf.load(tmp_path / "a", {"model": into, "average": other})
    assert torch.equal(into.weight, model.weight) and torch.equal(other.shadow["weight"], average.shadow["weight"])


def test_groups_that_begin_with_one_rate_get_their_own(tmp_path):
    def made(rates):
        model = net(0)
        groups = [{"params": [model.weight], "lr": rates[0]}, {"params": [model.bias], "lr": rates[1]}]
        return model, torch.optim.AdamW(groups, capturable=False, foreach=False)

    for rates in ([0.5, 0.25], [0.5, 0.5]):
        model, optimizer = made([torch.tensor(rate) for rate in rates])
        sf.save(tmp_path / f"{rates}", {"model": model, "optimizer": optimizer})
        one = torch.tensor(0.125)
        into, other = made([one, one])
        sf.load(tmp_path / f"{rates}", {"model": into, "optimizer": other})
        found = [group["lr"] for group in other.param_groups]
        assert [float(rate) for rate in found] == rates
        assert (found[0] is found[1] is one) == (rates[0] == rates[1])


LAZY = {"conj": (torch.conj, torch.complex64), "neg": (torch._neg_view, torch.float32)}


class Viewing(nn.Module):
    def __init__(self, name, view, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, dtype=dtype))
        self.register_buffer(name, torch.zeros(8, dtype=dtype) if view is None else view(self.w.detach()))


@pytest.mark.parametrize("name", ["a_view", "z_view"])
@pytest.mark.parametrize("kind", LAZY)
def test_a_lazy_view_is_saved_as_it_reads(tmp_path, kind, name):
    view, dtype = LAZY[kind]
    saved = Viewing(name, view, dtype)
    value = getattr(saved, name).clone().resolve_conj().resolve_neg()
    sf.save(tmp_path / "a", {"m": saved})
    apart = Viewing(name, None, dtype)
    sf.load(tmp_path / "a", {"m": apart})
    assert torch.equal(apart.w, saved.w) and torch.equal(getattr(apart, name), value)
    same = Viewing(name, view, dtype)
    sf.load(tmp_path / "a", {"m": same})
    assert torch.equal(same.w, saved.w) and torch.equal(getattr(same, name), value)
    with torch.no_grad():
        getattr(apart, name).add_(1)
    sf.save(tmp_path / "b", {"m": apart})
    with pytest.raises(sf.Invalid, match=rf"m/{name}: it is a view of m/w here, and what is saved for it is not"):
        sf.load(tmp_path / "b", {"m": same})


# Names and types


def test_a_name_in_the_checkpoint_means_itself(tmp_path):
    sf.save(tmp_path / "a", {"m": {"w[0]": torch.ones(2), "w0": torch.zeros(2)}, "k[1]": {"x": torch.ones(1)}})
    into = {"m": {"w[0]": torch.full((2,), 9.0), "w0": torch.full((2,), 9.0)}, "k[1]": {"x": torch.zeros(1)}}
    assert sf.load(tmp_path / "a", into, only="m/w[0]").tensors == ["m/w[0]"]
    assert sf.load(tmp_path / "a", into, only="k[1]").tensors == ["k[1]/x"]
    assert sf.load(tmp_path / "a", into, only="m/w[0-9]").tensors == ["m/w0"]
    assert sf.load(tmp_path / "a", into, only="m/w*").tensors == ["m/w[0]", "m/w0"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_cast_moments_are_of_the_type_that_the_optimizer_makes(tmp_path, dtype, fused):
    def made(kind):
        model = net(0).to(kind)
        return model, torch.optim.AdamW(model.parameters(), fused=fused)

    def step(model, optimizer):
        model(torch.ones(2, 4, dtype=model.weight.dtype)).square().sum().backward()
        optimizer.step()

    model, optimizer = made(torch.float32)
    step(model, optimizer)
    sf.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    for is_stepped in (False, True):
        into, other = made(dtype)
        if is_stepped:
            step(into, other)
        plan = sf.load(tmp_path / "a", {"model": into, "optimizer": other}, cast=True)
        moment = other.state[into.weight]["exp_avg"]
        assert torch.equal(moment, optimizer.state[model.weight]["exp_avg"].to(dtype)) and moment.dtype is dtype
        assert other.state[into.weight]["step"].dtype is torch.float32
        assert len(plan.cast) == 6
        step(into, other)


def test_an_array_that_has_a_tensors_memory_is_not_filled_through_it(tmp_path):
    model, into = nn.Linear(400, 400), nn.Linear(400, 400)
    sf.save(tmp_path / "a", {"model": model, "other": {"w": [model.weight.detach().numpy() + 5]}})
    values = {"w": [into.weight.detach().numpy()]}
    sf.load(tmp_path / "a", {"model": into, "other": values})
    assert torch.equal(into.weight, model.weight)
    assert torch.equal(torch.from_numpy(values["w"][0]), model.weight.detach() + 5)
    array = into.weight.detach().numpy()
    sf.save(tmp_path / "b", {"array": array + 1, "tensor": torch.zeros(400, 400)})
    with pytest.raises(sf.Invalid, match=r"overlap: .*tensor"):
        sf.load(tmp_path / "b", {"array": array, "tensor": into.weight.detach()})


WAYS = ["views of one buffer", "storages of their own", "in a list", "whole, in a list", "one table", "interleaved"]


@pytest.mark.parametrize("way", WAYS)
def test_state_that_shares_a_part_of_its_memory_is_refused(tmp_path, way):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    one, two = (optimizer.state[parameter] for parameter in model.parameters())
    state, both = {"model": model, "optimizer": optimizer}, torch.zeros(2, 4, 8)
    if way == "one table":  # a constant of the class
        one["n"] = two["n"] = torch.arange(9)
    elif way == "interleaved":
        one["both"], one["first"] = both[:, :, ::2], both[:, :, 1::2]
    else:
        inside = {"views of one buffer": both[0], "in a list": [both[0]], "whole, in a list": [both]}
        inside["storages of their own"] = torch.from_numpy(both.numpy()[1])
        one["both"], one["first"] = both, inside[way]
        with pytest.raises(sf.Invalid, match=r"SGD has '\w+' and '\w+' in its state, which share memory, and"):
            sf.save(tmp_path / "one", state)
        return
    sf.save(tmp_path / "one", state)


class Counting(torch.optim.Optimizer):
    """Counts its steps in one tensor, which stands in the state of each parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        parameters = self.param_groups[0]["params"]
        first = self.state[parameters[0]]
        for parameter in parameters:
            entries = self.state[parameter]
            entries.setdefault("n", first.setdefault("n", torch.zeros(())))
            entries["n"] += 1
            parameter.data.sub_(parameter.grad * 0.1 / entries["n"])


def test_a_state_tensor_that_stands_in_several_places_comes_back_as_one(tmp_path):
    def begun(steps):
        torch.manual_seed(3)
        model = nn.Linear(4, 2)
        return trained(model, Counting(model.parameters()), steps)

    def trained(model, optimizer, steps):
        for _ in range(steps):
            model.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = begun(2)
    sf.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    trained(model, optimizer, 2)
    for stepped in (0, 1):
        other, loaded = begun(stepped)
        sf.load(tmp_path / "a", {"model": other, "optimizer": loaded})
        first, second = (loaded.state[parameter]["n"] for parameter in other.parameters())
        assert first is second
        trained(other, loaded, 2)
        assert first == optimizer.state[model.weight]["n"] == 8
        assert torch.equal(other.weight, model.weight)
        assert torch.equal(other.bias, model.bias)


@pytest.mark.parametrize("comes_first", ["model", "optimizer"])
def test_state_that_is_its_parameters_memory_comes_back_as_that(tmp_path, comes_first):
    def begun():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return (
            model,
            optimizer,
            dict(sorted({"model": model, "optimizer": optimizer}.items(), reverse=comes_first > "n")),
        )

    model, optimizer, state = begun()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["master"] = model.weight.detach().float()
    sf.save(tmp_path / "a", state)
    into, loaded, state = begun()
    sf.load(tmp_path / "a", state)
    master = loaded.state[into.weight]["master"]
    assert master.data_ptr() == into.weight.data_ptr()
    assert type(master) is torch.Tensor
    assert torch.equal(into.weight, model.weight)
    alone, its, _ = begun()
    before = alone.weight.detach().clone()
    sf.load(tmp_path / "a", {"model": alone, "optimizer": its}, only="optimizer")
    assert torch.equal(alone.weight, before)
    assert torch.equal(its.state[alone.weight]["master"], model.weight)


class Remembering(torch.optim.Optimizer):
    """Keeps a history, in one list for all groups: PyTorch gives each group the default itself."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "history": [1.0]})


def test_a_list_that_groups_share_stays_one(tmp_path):
    def begun():
        model = nn.Linear(4, 2)
        return model, Remembering([{"params": [one]} for one in model.parameters()])

    model, optimizer = begun()
    optimizer.param_groups[0]["history"].append(0.5)
    sf.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    into, loaded = begun()
    sf.load(tmp_path / "a", {"model": into, "optimizer": loaded})
    first, second = (group["history"] for group in loaded.param_groups)
    assert first is second
    assert first == [1.0, 0.5]
    optimizer.param_groups[1]["history"] = [2.0]
    sf.save(tmp_path / "b", {"model": model, "optimizer": optimizer})
    sf.load(tmp_path / "b", {"model": into, "optimizer": loaded})
    assert [group["history"] for group in loaded.param_groups] == [[1.0, 0.5], [2.0]]


@pytest.mark.parametrize("where", ["state", "group"])
def test_a_list_that_stands_in_state_and_elsewhere_is_refused(tmp_path, where):
    model = nn.Linear(4, 2)
    optimizer = Remembering(model.parameters())
    optimizer.state[model.weight]["seen"] = shared = [1]
    optimizer.state[model.bias]["seen"] = [1]
    (optimizer.state[model.bias] if where == "state" else optimizer.param_groups[0])["seen"] = shared
    with pytest.raises(sf.Invalid, match=r"Remembering has 'seen' in its state, a list that stands elsewhere"):
        sf.save(tmp_path / "b", {"model": model, "optimizer": optimizer})


@pytest.mark.parametrize(
    ("saved", "dtype", "found"),
    [
        (0.1, torch.float32, 0.1),
        (2**24, torch.float32, 2.0**24),
        (True, torch.float32, 1.0),
        (float("inf"), torch.float16, float("inf")),
        (2**24 + 1, torch.float32, None),
        (2.75, torch.int64, None),
        (-1, torch.uint8, None),
        (2, torch.bool, None),
        (1e300, torch.float32, None),
    ],
)
def test_a_number_is_put_into_a_tensor_only_where_it_stays_itself(tmp_path, saved, dtype, found):
    def begun(value):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight]["n"] = value
        return model, optimizer, {"model": model, "optimizer": optimizer}

    sf.save(tmp_path / "a", begun(saved)[2])
    model, optimizer, state = begun(torch.tensor(0, dtype=dtype))
    if found is None:
        with pytest.raises(sf.Invalid, match=r"the checkpoint holds .*, which as torch\.\w+ is "):
            sf.load(tmp_path / "a", state)
        assert optimizer.state[model.weight]["n"] == 0
    else:
        sf.load(tmp_path / "a", state)
        assert optimizer.state[model.weight]["n"] == torch.tensor(found, dtype=dtype)


class Picky:
    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, said):
        raise KeyError("scale")


def test_an_objects_own_error_comes_with_its_key(tmp_path):
    sf.save(tmp_path / "a", {"scaler": Picky()})
    with pytest.raises(KeyError, match="scale") as raised:
        sf.load(tmp_path / "a", {"scaler": Picky()})
    (note,) = raised.value.__notes__
    assert note.startswith("in the load_state_dict() of a ") and note.endswith("Picky, which stands at scaler")
