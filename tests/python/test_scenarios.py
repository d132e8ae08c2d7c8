"""Models and optimizers that PyTorch's own tests of FSDP1, FSDP2 and state dicts have: each is saved under one layout
and loaded under others, and PyTorch gathers what it should be."""

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import known, same_bits
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from units import WIDTH, Net, Unit, adamw, bare, state_of, train, unequal, units_of, whole_of, wrap


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


class Mixed(Scenario):
    """A unit in float16 and one in bfloat16 in a model in float32."""

    class net(Net):
        def forward(self, x, step=0):
            x = self.second(self.first(x).half())
            return self.head(self.third(x.bfloat16()).float())

    def prepared(self, net):
        net.second.half()
        net.third.bfloat16()
        return net


class Converted(Scenario):
    """Wrapped in float32 and then converted, before the first forward."""

    def make(self, layout, seed):
        torch.manual_seed(seed)
        model = wrap(layout, self.net()).half()
        return model, self.optimizer(model)


class Regional(Scenario):
    """Layers that are compiled one by one."""

    def prepared(self, net):
        for unit in units_of(net):
            unit.linear = torch.compile(unit.linear, backend="eager")
        return net


class Recomputed(Scenario):
    """Layers that are wrapped for activation checkpointing after the model was."""

    def make(self, layout, seed):
        model, _ = super().make(layout, seed)
        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, nn.Linear))
        return model, self.optimizer(model)


class Attached(Scenario):
    """A head that the model gets after it was wrapped, which is the same on all ranks."""

    layouts = ("plain", "fsdp1 orig", "fsdp1 flat", "fsdp2")

    def make(self, layout, seed):
        torch.manual_seed(seed)
        net = self.net()
        head = net.head
        del net.head
        model = wrap(layout, net)
        bare(model).head = head
        return model, self.optimizer(model)


class Turned(Scenario):
    """Two groups, whose parameters odd ranks give in the opposite order."""

    def optimizer(self, model):
        net = bare(model)
        first = [*net.first.parameters(), *net.second.parameters()]
        known_ids = set(map(id, first))
        groups = [first, [parameter for parameter in model.parameters() if id(parameter) not in known_ids]]
        if dist.is_initialized() and dist.get_rank() % 2:
            groups = [group[::-1] for group in groups]
        decays = (0.25, 0.5)
        groups = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, decays, strict=True)]
        return torch.optim.AdamW(groups, lr=1e-2, foreach=False)

    def check(self, model, optimizer):
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.5]


class Tiny(Scenario):
    """Parameters with one element: most ranks hold nothing of them."""

    class net(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(1))
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, x, step=0):
            return super().forward(x) * self.scale


SCENARIOS = [Everything, Tied, Frozen, Sometimes, Changed, Pure, Buffers]
SCENARIOS += [Mixed, Converted, Regional, Recomputed, Attached, Turned, Tiny]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.lower())
def test_a_scenario_under_every_layout(ranks, tmp_path, scenario):
    wholes = ranks(2)(check_scenario, f"{tmp_path}", scenario())[0]
    check_alone(f"{tmp_path}", scenario(), wholes)


class Degenerate(Net):
    def __init__(self, has_scalar):
        super().__init__()
        self.third.none = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.randn(() if has_scalar else 1))

    def forward(self, x, step=0):
        return super().forward(x) * self.scale + self.third.none.sum()


def check_degenerate(rank, world, url):
    """FSDP1 and FSDP2 take no parameter without dimensions, FSDP2 none without elements either."""
    pairs = [(layout, layout) for layout in ("ddp", "fsdp1 orig", "fsdp1 flat", "fsdp1 flat strategies")]
    for layout, other in [*pairs, ("ddp", "plain")]:
        has_scalar = "fsdp1" not in f"{layout} {other}"
        model = wrap(layout, Degenerate(has_scalar))
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        place = f"{url}/{layout}-{other}"
        sf.save(place, state_of(model, optimizer))
        into = wrap(other, Degenerate(has_scalar))
        its_optimizer = adamw(into)
        sf.load(place, state_of(into, its_optimizer))
        assert unequal(whole_of(into), whole_of(model)) == [], (layout, other)
        if "ddp" in layout:  # PyTorch gathers no state of a parameter that has no elements
            assert unequal(whole_of(into, its_optimizer), whole_of(model, optimizer)) == [], (layout, other)
        train(into, its_optimizer, range(2, 3))


def test_parameters_without_dimensions_and_without_elements(ranks, tmp_path):
    ranks(2)(check_degenerate, f"{tmp_path}")


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
