"""Models and optimizers that PyTorch's own tests of FSDP1, FSDP2 and state dicts have: each is saved under one layout
and loaded under others, and PyTorch gathers what it should be."""

import inspect
import itertools

import pytest
import shardfast as sf
import torch
from layouts import known, same_bits
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from units import WIDTH, Net, Unit, adamw, bare, state_of, train, unequal, whole_of, wrap, wrap_fsdp2


class Scenario:
    """A model and how it is trained; made on every rank, with other numbers for another seed."""

    net = Net
    layouts = ("plain", "ddp", "fsdp1 orig", "fsdp1 flat", "fsdp2")

    def make(self, layout, seed):
        torch.manual_seed(seed)
        model = wrap(layout, self.prepared(self.net()))
        return model, self.optimizer(model)

    def prepared(self, net):
        return net

    def optimizer(self, model):
        return adamw(model)

    def check(self, model, optimizer):
        """What else must be there after a load."""


def check_scenario(rank, world, url, scenario, steps=3):
    """Each layout is saved and loaded by itself and two others, into optimizers with and without state."""
    count = len(scenario.layouts)
    wholes = {}
    for number, layout in enumerate(scenario.layouts):
        model, optimizer = scenario.make(layout, 0)
        train(model, optimizer, range(steps))
        wholes[layout] = whole_of(model, optimizer)
        sf.save(f"{url}/{number}", state_of(model, optimizer))
        assert unequal(whole_of(model, optimizer), wholes[layout]) == [], f"{layout}: a save changes nothing"
    for number, layout in enumerate(scenario.layouts):
        for other in {number, (number + 1) % count, (number + 4) % count}:
            model, optimizer = scenario.make(layout, 1)
            if (number + other) % 2:
                train(model, optimizer, range(steps + 4))
            sf.load(f"{url}/{other}", state_of(model, optimizer))
            names = unequal(whole_of(model, optimizer), wholes[scenario.layouts[other]])
            assert names == [], (scenario.layouts[other], layout)
            scenario.check(model, optimizer)
            train(model, optimizer, range(steps, steps + 1))
    return wholes


def check_alone(url, scenario, wholes):
    """One process loads all of it, and the other way round."""
    for number, layout in enumerate(scenario.layouts):
        model, optimizer = scenario.make("plain", 2)
        sf.load(f"{url}/{number}", state_of(model, optimizer))
        assert unequal(whole_of(model, optimizer), wholes[layout]) == [], layout
        scenario.check(model, optimizer)


class Everything(Scenario):
    layouts = (
        "plain",
        "ddp",
        "fsdp1 orig",
        "fsdp2",
        "fsdp1 flat",
        "fsdp1 flat strategies",
        "fsdp2 columns",
        "fsdp1 orig strategies",
        "fsdp1 orig twice",
        "fsdp1 flat inner",
        "fsdp2 offload",
        "fsdp1 root orig",
        "fsdp1 root flat",
        "ddp compiled recomputed",
        "fsdp1 orig compiled recomputed",
        "fsdp1 flat recomputed",
        "fsdp2 compiled recomputed",
        "fsdp2 gathered",
    )


class Tied(Scenario):
    """One weight in two places outside of the units, one unit in two places."""

    class net(Net):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
            self.after.weight = self.before.weight
            self.again = self.second

        def forward(self, x, step=0):
            return self.head(self.after(self.again(self.third(self.second(self.first(self.before(x)))))))

    def check(self, model, optimizer):
        net = bare(model)
        if isinstance(net, Net):
            assert net.after.weight is net.before.weight


class Frozen(Scenario):
    """A frozen unit, and one that is frozen in part where a layout allows that."""

    layouts = ("plain", "ddp", "fsdp1 orig", "fsdp1 flat", "fsdp2", "fsdp1 root orig")

    def prepared(self, net):
        net.second.requires_grad_(False)
        return net


class Sometimes(Scenario):
    """One unit is used in every second step, one never: their counters differ, or they have no state."""

    class net(Net):
        def forward(self, x, step=0):
            x = self.first(x)
            return self.head(self.second(x) if step % 2 else x)


class Groups(Scenario):
    """Several groups with options of their own, one of them empty; a schedule has changed some."""

    def optimizer(self, model):
        net = bare(model)
        groups = [
            {"params": list(net.first.parameters()), "lr": 0.02, "betas": (0.8, 0.9)},
            {"params": []},
            {"params": [*net.second.parameters(), *net.third.parameters()], "weight_decay": 0.5},
        ]
        known = {id(parameter) for group in groups for parameter in group["params"]}
        groups.append({"params": [p for p in model.parameters() if id(p) not in known], "eps": 1e-6})
        return torch.optim.AdamW(groups, lr=1e-2, foreach=False)

    def check(self, model, optimizer):
        assert [group["lr"] for group in optimizer.param_groups[::2]] == [0.02, 0.01]
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
        assert optimizer.param_groups[2]["weight_decay"] == 0.5
        assert optimizer.param_groups[3]["eps"] == 1e-6


class Changed(Groups):
    """As before; here the groups have other options before a load."""

    def make(self, layout, seed):
        model, optimizer = super().make(layout, seed)
        if seed:
            for group in optimizer.param_groups:
                group.update({"lr": 7.0, "betas": (0.1, 0.1), "eps": 1.0, "weight_decay": 3.0})
        return model, optimizer


class Pure(Scenario):
    """Everything in bfloat16."""

    def prepared(self, net):
        return net.to(torch.bfloat16)


class Buffers(Scenario):
    """Buffers beside parameters, alone in a unit, and ones that are not saved."""

    class net(Net):
        def __init__(self):
            super().__init__()
            self.table = Unit()
            del self.table.linear, self.table.gain
            self.table.register_buffer("rows", torch.randn(4, 3))
            self.register_buffer("seen", torch.randint(99, ()))
            self.second.register_buffer("mask", torch.randint(2, (WIDTH,)) > 0)
            self.third.register_buffer("cache", torch.randn(2), persistent=False)

    def make(self, layout, seed):
        model, optimizer = super().make(layout, seed)
        next(buffer for name, buffer in model.named_buffers() if name.endswith("cache")).fill_(seed)
        return model, optimizer

    def check(self, model, optimizer):
        cache = next(buffer for name, buffer in model.named_buffers() if name.endswith("cache"))
        assert cache.tolist() in ([1, 1], [2, 2]), "what is not saved is left alone"


SCENARIOS = [Everything, Tied, Frozen, Sometimes, Changed, Pure, Buffers]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.lower())
def test_a_scenario_under_every_layout(ranks, tmp_path, scenario):
    wholes = ranks(2)(check_scenario, f"{tmp_path}", scenario())[0]
    check_alone(f"{tmp_path}", scenario(), wholes)


# Counters and state that one flat parameter cannot keep apart


class Counting(torch.optim.Optimizer):
    """Gradient descent that counts steps in Python and holds ``None``, as some optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.update(step=state.get("step", 0) + 1, none=None)
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def counters_of(model, optimizer):
    return [optimizer.state[p]["step"] for p in model.parameters() if p in optimizer.state]


def check_counters(rank, world, url):
    model = wrap("fsdp1 orig", Net())
    optimizer = Counting(model.parameters())
    train(model, optimizer, range(2))
    sf.save(f"{url}/even", state_of(model, optimizer))
    net = model.module
    for parameter in net.head.parameters():
        if parameter in optimizer.state:
            optimizer.state[parameter]["step"] = 9
    sf.save(f"{url}/uneven", state_of(model, optimizer))
    for layout in ("fsdp1 flat", "fsdp1 root flat", "fsdp1 root orig", "fsdp2", "plain"):
        model = wrap(layout, Net())
        optimizer = Counting(model.parameters())
        sf.load(f"{url}/even", state_of(model, optimizer))
        assert set(counters_of(model, optimizer)) == {2}, layout
        if layout != "fsdp1 root flat":
            sf.load(f"{url}/uneven", state_of(model, optimizer))
            assert set(counters_of(model, optimizer)) <= {2, 9}, layout
            continue
        with pytest.raises(sf.Invalid, match=r"step is \d and state\.\S+\.step is \d .* belong to one flat parameter"):
            sf.load(f"{url}/uneven", state_of(model, optimizer))


def test_counters_in_python_that_differ_do_not_fit_into_one_flat_parameter(ranks, tmp_path):
    ranks(2)(check_counters, f"{tmp_path}")


def check_never_stepped(rank, world, url):
    """The second unit has no state; in one flat parameter it would have the counter of the others."""
    model = wrap("fsdp2", Sometimes.net())
    optimizer = adamw(model)
    train(model, optimizer, (0, 2, 4))
    sf.save(url, state_of(model, optimizer))
    whole = whole_of(model, optimizer)
    for layout in ("fsdp1 flat", "fsdp1 orig", "ddp"):
        into = wrap(layout, Sometimes.net())
        its_optimizer = adamw(into)
        train(into, its_optimizer, range(2))
        sf.load(url, state_of(into, its_optimizer))
        assert unequal(whole_of(into, its_optimizer), whole) == [], layout
    for steps in (0, 2):
        into = wrap("fsdp1 root flat", Sometimes.net())
        its_optimizer = adamw(into)
        train(into, its_optimizer, range(steps))
        with pytest.raises(sf.Invalid, match=r"no state for 'second\.gain', which was not stepped"):
            sf.load(url, state_of(into, its_optimizer))
        sf.load(url, state_of(into, its_optimizer), strict=False)
        loaded = whole_of(into, its_optimizer)
        assert [name for name in whole if not same_bits(whole[name], loaded[name])] == []
        assert not loaded["optimizer/state.second.gain.exp_avg"].any()


def test_what_was_never_stepped_does_not_fit_into_one_flat_parameter(ranks, tmp_path):
    ranks(2)(check_never_stepped, f"{tmp_path}/checkpoint")


# A part of a model, or more than it


def check_parts(rank, world, url):
    for number, layout in enumerate(("fsdp1 orig", "fsdp1 flat", "fsdp2", "ddp")):
        model = wrap(layout, Net())
        part = torch.optim.AdamW(bare(model).first.parameters(), lr=1e-2, foreach=False)
        train(model, part, range(2))
        sf.save(f"{url}/{number}", state_of(model, part))
        whole = whole_of(model, part)
        for other in ("fsdp2", "fsdp1 flat", "fsdp1 orig"):
            into = wrap(other, Net())
            its = torch.optim.AdamW(bare(into).first.parameters(), lr=1e-2, foreach=False)
            sf.load(f"{url}/{number}", state_of(into, its))
            assert unequal(whole_of(into, its), whole) == [], (layout, other)
            every = adamw(into)
            with pytest.raises(sf.Invalid, match=r"no saved parameter group has"):
                sf.load(f"{url}/{number}", state_of(into, every))
            sf.load(f"{url}/{number}", state_of(into, every), strict=False)
            assert unequal(whole_of(into, every), whole) == [], (layout, other)


def test_an_optimizer_of_a_part_of_the_model(ranks, tmp_path):
    ranks(2)(check_parts, f"{tmp_path}")


class Longer(Net):
    def __init__(self):
        super().__init__()
        self.fourth = Unit()
        del self.head


def check_missing(rank, world, url):
    """Units that are only in the checkpoint or only in the model are named, and left alone where that is asked for."""
    for number, layout in enumerate(("fsdp1 orig", "fsdp1 flat", "fsdp2")):
        sf.save(f"{url}/{number}", {"model": wrap(layout, Net())})
    for number, layout in itertools.product(range(3), ("fsdp1 flat", "fsdp2", "fsdp1 orig")):
        model = wrap(layout, Longer())
        before = whole_of(model)
        with pytest.raises(sf.Invalid, match=r"(?s)missing: model/fourth\.gain.*unexpected: model/head\.bias"):
            sf.load(f"{url}/{number}", {"model": model})
        assert unequal(whole_of(model), before) == [], "nothing has changed"
        plan = sf.load(f"{url}/{number}", {"model": model}, strict=False)
        assert plan.unexpected == ["model/head.bias", "model/head.weight"]
        assert sorted(plan.missing) == [f"model/fourth.{name}" for name in ("gain", "linear.bias", "linear.weight")]
        after = whole_of(model)
        changed = {name for name in before if not same_bits(before[name], after[name])}
        assert {name.split(".")[0] for name in changed} == {"model/first", "model/second", "model/third"}


def test_units_that_are_missing_or_unexpected(ranks, tmp_path):
    ranks(2)(check_missing, f"{tmp_path}")


def check_frozen_later(rank, world, url):
    """State that a parameter had before it was frozen is there after a load."""
    for number, layout in enumerate(("fsdp2", "fsdp1 orig")):
        model = wrap(layout, Net())
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        for parameter in bare(model).first.parameters():
            parameter.requires_grad_(False)
        sf.save(f"{url}/{number}", state_of(model, optimizer))
        whole = whole_of(model, optimizer)
        assert "optimizer/state.first.gain.exp_avg" in whole
        for other in ("fsdp1 flat", "fsdp2", "ddp"):
            into = wrap(other, Net())
            its_optimizer = adamw(into)
            sf.load(f"{url}/{number}", state_of(into, its_optimizer))
            assert unequal(whole_of(into, its_optimizer), whole) == [], (layout, other)


def test_parameters_that_were_frozen_after_some_steps(ranks, tmp_path):
    ranks(2)(check_frozen_later, f"{tmp_path}")


def check_ignored(rank, world, url):
    """FSDP2 does not shard the parameters in ``ignored_params``: each rank holds all of them."""
    model = Net()
    wrap_fsdp2("fsdp2", model, ignored_params=set(model.head.parameters()))
    assert not isinstance(model.head.weight, DTensor)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    sf.save(url, state_of(model, optimizer))
    whole = whole_of(model, optimizer)
    for layout in ("fsdp1 flat", "fsdp2", "plain"):
        into = wrap(layout, Net())
        its_optimizer = adamw(into)
        sf.load(url, state_of(into, its_optimizer))
        assert unequal(whole_of(into, its_optimizer), whole) == [], layout
    again = Net()
    wrap_fsdp2("fsdp2", again, ignored_params=set(again.head.parameters()))
    its_optimizer = adamw(again)
    sf.load(url, state_of(again, its_optimizer))
    assert unequal(whole_of(again, its_optimizer), whole) == []


@pytest.mark.skipif(
    "ignored_params" not in inspect.signature(fully_shard).parameters,
    reason="fully_shard of this torch has no ignored_params",
)
def test_parameters_that_are_ignored(ranks, tmp_path):
    ranks(2)(check_ignored, f"{tmp_path}/checkpoint")


# Precision


def check_precision(rank, world, url):
    """What is computed in bfloat16 is saved as it is stepped, in float32."""
    model = wrap_fsdp2("fsdp2", Net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float64))
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    sf.save(f"{url}/2", state_of(model, optimizer))
    whole = whole_of(model, optimizer)
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}
    into = wrap("fsdp1 flat", Net())
    its_optimizer = adamw(into)
    sf.load(f"{url}/2", state_of(into, its_optimizer))
    assert unequal(whole_of(into, its_optimizer), whole) == []


def test_mixed_precision_of_fsdp2(ranks, tmp_path):
    ranks(2)(check_precision, f"{tmp_path}")


def check_buffer_precision(rank, world, url):
    """FSDP1 casts buffers in its first forward: they are saved as they are then, and loaded as they are here."""

    def made():
        torch.manual_seed(0)
        precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        options = {"use_orig_params": True, "device_id": torch.device("cpu"), "mixed_precision": precision}
        return FSDP(Buffers.net(), auto_wrap_policy=ModuleWrapPolicy({Unit}), **options)

    model = made()
    model(known("x", (5, WIDTH)))
    rows = next(buffer for name, buffer in model.named_buffers() if name.endswith("rows"))
    assert rows.dtype == torch.bfloat16
    sf.save(url, {"model": model})
    fresh = made()
    with pytest.raises(sf.Invalid, match=r"dtype: model/table\.rows is BF16 in the checkpoint and F32 here"):
        sf.load(url, {"model": fresh})
    sf.load(url, {"model": fresh}, cast=True)
    its_rows = next(buffer for name, buffer in fresh.named_buffers() if name.endswith("rows"))
    assert same_bits(its_rows, rows.float())


def test_buffers_of_lower_precision_under_fsdp1(ranks, tmp_path):
    ranks(2)(check_buffer_precision, f"{tmp_path}/checkpoint")


# What modules add to their state


class Counter(Unit):
    """Has state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls, "name": "counter"}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Renamed(Unit):
    """Has another name for a parameter in its state dict."""

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(self.rename_saved)
        self.register_load_state_dict_pre_hook(self.rename_loaded)

    @staticmethod
    def rename_saved(module, state, prefix, metadata):
        state[f"{prefix}scale"] = state.pop(f"{prefix}gain")

    @staticmethod
    def rename_loaded(module, state, prefix, *rest):
        if f"{prefix}scale" in state:
            state[f"{prefix}gain"] = state.pop(f"{prefix}scale")


def with_second(kind, layout, seed):
    torch.manual_seed(seed)
    net = Net()
    net.second = kind()
    return wrap(layout, net)


def check_extra(rank, world, url):
    layouts = ("fsdp1 orig", "fsdp1 flat", "fsdp2", "ddp", "fsdp1 flat recomputed", "fsdp2 recomputed")
    for number, layout in enumerate(layouts):
        model = with_second(Counter, layout, 0)
        counter = next(module for module in model.modules() if isinstance(module, Counter))
        counter.calls = number + 3
        sf.save(f"{url}/{number}", {"model": model})
        whole = whole_of(model)
        for other in layouts[number:] + layouts[:1]:
            into = with_second(Counter, other, 1)
            sf.load(f"{url}/{number}", {"model": into})
            assert unequal(whole_of(into), whole) == [], (layout, other)
            counter = next(module for module in into.modules() if isinstance(module, Counter))
            assert counter.calls == number + 3, (layout, other)


def test_extra_state_of_units(ranks, tmp_path):
    ranks(2)(check_extra, f"{tmp_path}")


def check_hooks(rank, world, url):
    for number, layout in enumerate(("fsdp2", "ddp", "plain")):
        model = with_second(Renamed, layout, 0)
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        sf.save(f"{url}/{number}", state_of(model, optimizer))
        for other in ("plain", "fsdp2"):
            into = with_second(Renamed, other, 1)
            its_optimizer = adamw(into)
            plan = sf.load(f"{url}/{number}", state_of(into, its_optimizer))
            assert "model/second.scale" in plan.tensors
            assert unequal(whole_of(into, its_optimizer), whole_of(model, optimizer)) == [], (layout, other)
    model = with_second(Renamed, "fsdp1 orig", 0)
    with pytest.raises(sf.Invalid, match=r"'_fsdp_wrapped_module\.second\S*' has a hook on its state dict"):
        sf.save(f"{url}/no", {"model": model})


def test_hooks_that_rename(ranks, tmp_path):
    ranks(2)(check_hooks, f"{tmp_path}")


def check_buffers_alone(rank, world, url):
    """FSDP1 and FSDP2 around modules without a parameter."""
    for layout in ("fsdp1", "fsdp2"):
        made = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            net = nn.Module()
            net.register_buffer("mean", torch.randn(3))
            net.inside = Unit()
            del net.inside.linear, net.inside.gain
            net.inside.register_buffer("count", torch.tensor(seed + 5))
            made.append(wrap(layout, net))
        sf.save(f"{url}/{layout}", {"model": made[0]})
        sf.load(f"{url}/{layout}", {"model": made[1]})
        one, other = (dict(model.named_buffers()) for model in made)
        assert unequal(one, other) == []


def test_modules_with_buffers_only(ranks, tmp_path):
    ranks(2)(check_buffers_alone, f"{tmp_path}")


# When


def check_times(rank, world, url):
    """What is saved before the first forward, and between two backwards whose gradients are summed up."""
    for number, layout in enumerate(("fsdp1 orig", "fsdp1 flat", "fsdp2", "ddp")):
        torch.manual_seed(0)
        model = wrap(layout, Net())
        optimizer = adamw(model)
        sf.save(f"{url}/{number}-first", state_of(model, optimizer))
        train(model, optimizer, range(2))
        if "fsdp2" in layout:
            model.set_requires_gradient_sync(False)
            model(known("x", (5, WIDTH))).sum().backward()
        else:
            with model.no_sync():
                model(known("x", (5, WIDTH))).sum().backward()
        sf.save(f"{url}/{number}-between", state_of(model, optimizer))
        into = wrap("fsdp2", Net())
        its_optimizer = adamw(into)
        sf.load(f"{url}/{number}-between", state_of(into, its_optimizer))
        assert unequal(whole_of(into, its_optimizer), whole_of(model, optimizer)) == [], layout
        sf.load(f"{url}/{number}-first", state_of(into, its_optimizer))
        torch.manual_seed(0)
        first = {f"model/{name}": tensor for name, tensor in Net().state_dict().items()}
        assert unequal(whole_of(into, its_optimizer), first) == [], layout


def test_before_the_first_forward_and_while_gradients_are_summed_up(ranks, tmp_path):
    ranks(2)(check_times, f"{tmp_path}")


def check_gathered(rank, world, url):
    """FSDP2 that does not shard again after a forward."""
    model = wrap("fsdp2 gathered", Net())
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    whole, x = whole_of(model, optimizer), known("x", (5, WIDTH))
    with torch.no_grad():
        expected = model(x)
    sf.save(f"{url}/now", state_of(model, optimizer))
    with torch.no_grad():
        model(x)
    pending = sf.save_async(f"{url}/later", state_of(model, optimizer))
    train(model, optimizer, range(2, 4))
    pending.committed()
    for name in ("now", "later"):
        with torch.no_grad():
            model(x)
        sf.load(f"{url}/{name}", state_of(model, optimizer))
        with torch.no_grad():
            assert same_bits(model(x), expected), "a forward uses what was loaded"
        assert unequal(whole_of(model, optimizer), whole) == []
        train(model, optimizer, range(4, 5))


def test_parameters_that_fsdp2_leaves_gathered(ranks, tmp_path):
    ranks(2)(check_gathered, f"{tmp_path}")


def check_contexts(rank, world, url):
    """The kind of state dict that a program has chosen for FSDP1 changes nothing."""
    for layout in ("fsdp1 orig", "fsdp1 flat"):
        model = wrap(layout, Net())
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        whole = whole_of(model, optimizer)
        for kind in StateDictType:
            with FSDP.state_dict_type(model, kind):
                sf.save(f"{url}/{layout}-{kind.name}", state_of(model, optimizer))
            train(model, optimizer, range(2, 3))
            with FSDP.state_dict_type(model, kind):
                sf.load(f"{url}/{layout}-{kind.name}", state_of(model, optimizer))
            assert unequal(whole_of(model, optimizer), whole) == [], (layout, kind)


def test_kinds_of_state_dicts_of_fsdp1(ranks, tmp_path):
    ranks(2)(check_contexts, f"{tmp_path}")


# Other numbers of ranks


def save_units(rank, world, url, layouts):
    wholes = {}
    for number, layout in enumerate(layouts):
        torch.manual_seed(number)
        model = wrap(layout, Net())
        optimizer = adamw(model)
        train(model, optimizer, range(3))
        wholes[number] = whole_of(model, optimizer)
        sf.save(f"{url}/{number}", state_of(model, optimizer))
    return wholes


def load_units(rank, world, url, layouts, wholes):
    for number, whole in wholes.items():
        for shift in (0, 2):
            layout = layouts[(number + shift) % len(layouts)]
            model = wrap(layout, Net())
            optimizer = adamw(model)
            sf.load(f"{url}/{number}", state_of(model, optimizer))
            assert unequal(whole_of(model, optimizer), whole) == [], (number, layout)


def test_another_number_of_ranks(ranks, tmp_path):
    layouts = ["fsdp1 flat strategies", "fsdp2", "fsdp1 orig twice", "ddp", "fsdp1 root flat", "fsdp2 gathered"]
    url = f"{tmp_path}"
    wholes = ranks(3)(save_units, url, layouts)[0]
    for world in (1, 2, 4):
        ranks(world)(load_units, url, layouts, wholes)
