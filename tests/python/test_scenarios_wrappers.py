"""What programs do with wrapped models beside training them: convert, replace, attach, freeze and wrap again, as
PyTorch's own tests of FSDP1, FSDP2 and DistributedDataParallel do. PyTorch gathers what should be saved and loaded."""

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import known, local, same_bits
from older import AVERAGED
from test_scenarios import Scenario, check_alone, check_scenario
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim.swa_utils import AveragedModel
from units import WIDTH, Net, Unit, adamw, bare, clean, state_of, train, unequal, units_of, whole_of, wrap

CPU = torch.device("cpu")


def model_of(whole):
    """What is not an optimizer's of what PyTorch gathered."""
    return {name: tensor for name, tensor in whole.items() if name.startswith("model/")}


# Under every layout


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


SCENARIOS = [Mixed, Converted, Regional, Recomputed, Attached, Turned, Tiny]


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


# Parameters and models that change after they were wrapped


def replace(model, by_data):
    """Gives the first unit's weight other numbers, past FSDP1: this rank's elements of it, where it has some."""
    linear = bare(model).first.linear
    number = nn.Parameter(torch.full_like(linear.weight, 2.0))
    if by_data:
        linear.weight.data = number.data
    else:
        linear.weight = number


def check_replaced(rank, world, url):
    """FSDP1 takes over at the next forward what was put in place of a parameter: neither may be lost till then."""
    for number, (layout, by_data) in enumerate(
        (layout, by_data) for layout in ("fsdp1 orig", "fsdp1 orig strategies") for by_data in (True, False)
    ):
        for steps in (0, 2):
            model = wrap(layout, Net())
            optimizer = adamw(model)
            train(model, optimizer, range(steps))
            place = f"{url}/{number}-{steps}"
            sf.save(place, {"model": model})
            replace(model, by_data)
            told = r"its parameter '(first\.)?linear\.weight' was replaced .*enter and leave .*summon_full_params\(\)"
            with pytest.raises(sf.Invalid, match=told):
                sf.save(f"{place}-no", {"model": model})
            with pytest.raises(sf.Invalid, match=told):
                sf.load(place, {"model": model})
            with FSDP.summon_full_params(model):
                pass
            sf.save(f"{place}-new", {"model": model})
            plain = Net()
            sf.load(f"{place}-new", {"model": plain})
            assert bool((plain.first.linear.weight == 2).all())
            sf.load(place, {"model": model})
            sf.load(place, {"model": plain})
            with FSDP.summon_full_params(model):
                assert all(map(same_bits, model.parameters(), plain.parameters()))


def test_parameters_that_were_replaced_under_fsdp1(ranks, tmp_path):
    ranks(2)(check_replaced, f"{tmp_path}")


def check_converted_later(rank, world, url):
    """FSDP1 does not follow a conversion after the first forward: it keeps what was there. FSDP2 is saved as it is."""
    for layout in ("fsdp1 orig", "fsdp1 flat", "fsdp1 orig strategies", "fsdp2"):
        model = wrap(layout, Net())
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        sf.save(f"{url}/{layout}", {"model": model})
        whole = model_of(whole_of(model, optimizer))
        model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        if "fsdp1" in layout:
            told = r"was converted or moved after its first forward"
            with pytest.raises(sf.Invalid, match=told):
                sf.save(f"{url}/no", {"model": model})
            with pytest.raises(sf.Invalid, match=told):
                sf.load(f"{url}/{layout}", {"model": model}, cast=True)
            model = wrap(layout, Net().double())
        else:
            sf.save(f"{url}/zeros", {"model": model})
            plain = Net().double()
            sf.load(f"{url}/zeros", {"model": plain})
            assert not any(bool(parameter.any()) for parameter in plain.parameters())
        sf.load(f"{url}/{layout}", {"model": model}, cast=True)
        assert unequal(whole_of(model), {name: tensor.double() for name, tensor in whole.items()}) == []
        plain = Net().double()
        sf.load(f"{url}/{layout}", {"model": plain}, cast=True)
        if "fsdp1" in layout:
            with torch.no_grad():
                x = known("x", (5, WIDTH)).double()
                assert same_bits(model(x), plain(x)), f"{layout}: a forward uses what was loaded"


def test_models_that_are_converted_after_their_first_forward(ranks, tmp_path):
    ranks(2)(check_converted_later, f"{tmp_path}")


def check_cast(rank, world, url):
    """What was trained in float32 goes on in bfloat16 and in float64, moments that are there already as well."""
    for source, layout, dtype in (
        ("fsdp2", "fsdp1 orig", torch.bfloat16),
        ("fsdp1 orig", "fsdp1 flat", torch.float64),
        ("fsdp1 flat", "fsdp1 orig strategies", torch.float64),
        ("ddp", "fsdp1 root flat", torch.bfloat16),
        ("fsdp1 root flat", "fsdp2", torch.bfloat16),
    ):
        torch.manual_seed(0)
        model = wrap(source, Net())
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        sf.save(f"{url}/{layout}", state_of(model, optimizer))
        whole = whole_of(model, optimizer)
        into = wrap(layout, Net().to(dtype))
        its_optimizer = adamw(into)
        train(into, its_optimizer, range(2, 4))
        with pytest.raises(sf.Invalid, match=r"dtype: model/first\.gain is F32 in the checkpoint and \w+ here"):
            sf.load(f"{url}/{layout}", state_of(into, its_optimizer))
        sf.load(f"{url}/{layout}", state_of(into, its_optimizer), cast=True)
        expected = {name: tensor if name.endswith(".step") else tensor.to(dtype) for name, tensor in whole.items()}
        assert unequal(whole_of(into, its_optimizer), expected) == [], (source, layout)
        train(into, its_optimizer, range(4, 5))


def test_models_that_go_on_in_another_precision(ranks, tmp_path):
    ranks(2)(check_cast, f"{tmp_path}")


def check_more_groups(rank, world, url):
    """Units whose training begins later: the optimizer gets another group between two saves."""
    for layout in ("ddp", "fsdp1 orig", "fsdp1 flat", "fsdp2"):
        torch.manual_seed(0)
        model = wrap(layout, Net())
        optimizer = torch.optim.AdamW(bare(model).first.parameters(), lr=1e-2, foreach=False)
        for number in range(2):
            train(model, optimizer, range(2))
            sf.save(f"{url}/{layout}-{number}", state_of(model, optimizer))
            if number == 0:
                earlier = whole_of(model, optimizer)
                optimizer.add_param_group({"params": list(bare(model).second.parameters()), "lr": 0.5})
        for other in ("fsdp2", "fsdp1 flat", "plain"):
            into = wrap(other, Net())
            groups = [list(bare(into).second.parameters()), list(bare(into).first.parameters())]
            its = torch.optim.AdamW([{"params": group} for group in groups], lr=7.0, foreach=False)
            sf.load(f"{url}/{layout}-1", state_of(into, its))
            assert [group["lr"] for group in its.param_groups] == [0.5, 1e-2]
            assert unequal(whole_of(into, its), whole_of(model, optimizer)) == [], (layout, other)
            with pytest.raises(sf.Invalid, match=r"no saved parameter group has"):
                sf.load(f"{url}/{layout}-0", state_of(into, its))
            its.state.clear()
            sf.load(f"{url}/{layout}-0", state_of(into, its), strict=False)
            assert unequal(whole_of(into, its), earlier) == [], (layout, other)


def test_groups_that_are_added_between_two_saves(ranks, tmp_path):
    ranks(2)(check_more_groups, f"{tmp_path}")


# Optimizers


def check_two_optimizers(rank, world, url):
    """One flat parameter with runs of parameters that two classes of optimizers step."""

    def made(layout, seed):
        torch.manual_seed(seed)
        model = wrap(layout, Net())
        biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
        rest = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
        sgd = torch.optim.SGD(biases, lr=1e-2, momentum=0.9, foreach=False)
        return model, [torch.optim.AdamW(rest, lr=1e-2, foreach=False), sgd]

    def trained(model, optimizers):
        for step in range(2):
            model(known(f"x{step}", (5, WIDTH))).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def numbers(model, optimizers):
        """What a rank holds of the model and of the state of both, by place."""
        found = {(number, ""): local(parameter) for number, parameter in enumerate(model.parameters())}
        for number, parameter in enumerate(model.parameters()):
            for optimizer in optimizers:
                state = optimizer.state.get(parameter, {})
                found |= {(number, name): local(value) for name, value in state.items() if parameter.numel()}
        return found

    for layout in ("fsdp1 orig", "fsdp1 root orig", "fsdp2"):
        model, optimizers = made(layout, 0)
        trained(model, optimizers)
        sf.save(f"{url}/{layout}", state_of(model, optimizers))
        plain = made("plain", 1)
        sf.load(f"{url}/{layout}", state_of(*plain))
        assert [len(optimizer.state) for optimizer in plain[1]] == [7, 4]
        sf.save(f"{url}/{layout}-plain", state_of(*plain))
        for source in (layout, f"{layout}-plain"):
            into = made(layout, 2)
            sf.load(f"{url}/{source}", state_of(*into))
            assert unequal(numbers(*into), numbers(model, optimizers)) == [], source


def test_two_optimizers_of_one_flat_parameter(ranks, tmp_path):
    ranks(2)(check_two_optimizers, f"{tmp_path}")


def check_made_before(rank, world, url):
    """With ``use_orig_params=True`` and under DistributedDataParallel parameters stay the same objects."""
    for layout in ("ddp", "fsdp1 orig"):
        net = Net()
        optimizer = adamw(net)
        model = wrap(layout, net)
        train(model, optimizer, range(2))
        sf.save(f"{url}/{layout}", state_of(model, optimizer))
        into = wrap("fsdp2", Net())
        its_optimizer = adamw(into)
        sf.load(f"{url}/{layout}", state_of(into, its_optimizer))
        assert unequal(whole_of(into, its_optimizer), whole_of(model, optimizer)) == [], layout
    for layout in ("fsdp1 flat", "fsdp2"):
        net = Net()
        optimizer = adamw(net)
        model = wrap(layout, net)
        with pytest.raises(sf.Invalid, match=r"optimizer: a parameter of shape .* belongs to no module of the state"):
            sf.save(f"{url}/no", state_of(model, optimizer))


def test_optimizers_that_were_made_before_the_model_was_wrapped(ranks, tmp_path):
    ranks(2)(check_made_before, f"{tmp_path}")


def check_left_out(rank, world, url):
    """An optimizer that leaves out a parameter on some ranks would leave a hole in its state."""
    for layout in ("ddp", "fsdp1 flat", "fsdp2"):
        model = wrap(layout, Net())
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters[1:] if rank else parameters, lr=1e-2, foreach=False)
        train(model, optimizer, range(1))
        with pytest.raises(sf.Invalid, match=r"differ between rank 0 and rank 1"):
            sf.save(f"{url}/{layout}", state_of(model, optimizer))


def test_an_optimizer_that_leaves_out_a_parameter_on_one_rank(ranks, tmp_path):
    ranks(2)(check_left_out, f"{tmp_path}")


def check_plain_values(rank, world, url):
    """State that is no tensor, of parameters that one flat parameter holds, and no state that is one."""

    def made(layout):
        model = wrap(layout, Net())
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    for layout in ("ddp", "fsdp1 orig", "fsdp1 flat", "fsdp1 root flat", "fsdp2"):
        model, optimizer = made(layout)
        train(model, optimizer, range(1))
        for parameter in model.parameters():
            optimizer.state[parameter].update(rate=2.75, nothing=None)
        sf.save(f"{url}/{layout}", state_of(model, optimizer))
        for other in ("plain", "fsdp1 flat", "fsdp1 root flat", "fsdp2", layout):
            into, its_optimizer = made(other)
            sf.load(f"{url}/{layout}", state_of(into, its_optimizer))
            states = [its_optimizer.state[p] for p in into.parameters() if p.numel()]
            assert states and all(state == {"rate": 2.75, "nothing": None} for state in states), (layout, other)


def test_state_of_optimizers_that_is_no_tensor(ranks, tmp_path):
    ranks(2)(check_plain_values, f"{tmp_path}")


# Wrappers in wrappers, and of parts


def check_made(made, url):
    """What is saved of one of these is what a plain model loads, and another one of them."""
    model, optimizer = made(0)
    train(model, optimizer, range(2))
    sf.save(url, state_of(model, optimizer))
    plain, into = Net(), made(1)
    its_optimizer = adamw(plain)
    sf.load(url, state_of(plain, its_optimizer))
    sf.load(url, state_of(*into))
    whole = whole_of(plain, its_optimizer)
    assert unequal(whole_of(*into), whole) == unequal(whole_of(model, optimizer), whole) == []


def check_ddp_inside(rank, world, url):
    """A head under DistributedDataParallel, which FSDP1 around it ignores."""

    def made(seed):
        torch.manual_seed(seed)
        net = Net()
        net.head = nn.parallel.DistributedDataParallel(net.head)
        model = FSDP(net, ignored_modules=[net.head], use_orig_params=bool(seed % 2), device_id=CPU)
        return model, adamw(model)

    check_made(made, url)


def test_ddp_inside_of_fsdp1(ranks, tmp_path):
    ranks(2)(check_ddp_inside, f"{tmp_path}/checkpoint")


def check_ddp_outside(rank, world, url):
    """DistributedDataParallel around a model of which it ignores a unit that FSDP2 shards."""

    def made(seed):
        torch.manual_seed(seed)
        net = Net()
        fully_shard(net.second, mesh=init_device_mesh("cpu", (world,)), **AVERAGED)
        ignored = [f"second.{name}" for name, _ in net.second.named_parameters()]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
        model = nn.parallel.DistributedDataParallel(net)
        return model, adamw(model)

    check_made(made, url)


def test_fsdp2_inside_of_ddp(ranks, tmp_path):
    ranks(2)(check_ddp_outside, f"{tmp_path}/checkpoint")


def check_replicate(rank, world, url):
    """``replicate()``, which keeps the module's class and names."""
    model = replicate(Net())
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    sf.save(url, state_of(model, optimizer))
    for layout in ("fsdp2", "fsdp1 flat", "plain"):
        into = wrap(layout, Net())
        its_optimizer = adamw(into)
        sf.load(url, state_of(into, its_optimizer))
        assert unequal(whole_of(into, its_optimizer), whole_of(model, optimizer)) == [], layout


def test_replicated_modules(ranks, tmp_path):
    ranks(2)(check_replicate, f"{tmp_path}/checkpoint")


def check_own_groups(rank, world, url):
    """FSDP1 within groups of one rank each: all ranks hold everything, and no group tells that."""
    groups = [dist.new_group([number]) for number in range(world)]
    for use_orig_params in (True, False):

        def made(seed, use_orig_params=use_orig_params):
            torch.manual_seed(seed)
            options = {"process_group": groups[rank], "device_id": CPU, "use_orig_params": use_orig_params}
            model = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Unit}), **options)
            return model, adamw(model)

        model, optimizer = made(0)
        train(model, optimizer, range(2))
        place = f"{url}/{use_orig_params}"
        sf.save(place, state_of(model, optimizer))
        into, its_optimizer = made(1)
        sf.load(place, state_of(into, its_optimizer))
        for one, other in zip(model.parameters(), into.parameters(), strict=True):
            mine, its = optimizer.state[one], its_optimizer.state[other]
            assert same_bits(one, other)
            assert mine.keys() == its.keys() and all(same_bits(mine[name], its[name]) for name in mine)
        wholes = []
        for layout in ("plain", "fsdp2"):
            into = wrap(layout, Net())
            its_optimizer = adamw(into)
            sf.load(place, state_of(into, its_optimizer))
            wholes.append(whole_of(into, its_optimizer))
        assert unequal(*wholes) == []
        with FSDP.summon_full_params(model):
            here = dict(model.module.named_parameters())
            assert unequal({clean(f"model/{name}"): one for name, one in here.items()}, model_of(wholes[0])) == []


def test_fsdp1_within_groups_of_one_rank(ranks, tmp_path):
    ranks(2)(check_own_groups, f"{tmp_path}")


def check_averaged(rank, world, url):
    """A running average of the parameters, which PyTorch makes by copying the wrapped model."""

    def made(layout, seed):
        torch.manual_seed(seed)
        model = wrap(layout, Net())
        return model, AveragedModel(model, avg_fn=lambda mean, one, count: mean * 0.5 + one * 0.5)

    model, average = made("ddp", 0)
    optimizer = adamw(model)
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        average.update_parameters(model)
    sf.save(url, {"model": model, "average": average})
    for layout in ("plain", "ddp"):
        into, its_average = made(layout, 1)
        sf.load(url, {"model": into, "average": its_average})
        assert int(its_average.n_averaged) == 2
        pairs = [(into, model), (its_average, average)]
        assert all(same_bits(*two) for pair in pairs for two in zip(*(one.parameters() for one in pair), strict=True))
    assert not same_bits(average.module.module.head.weight, model.module.head.weight)


def test_averages_of_wrapped_models(ranks, tmp_path):
    ranks(2)(check_averaged, f"{tmp_path}/checkpoint")


# A trained model as a part of another one


class Tuned(nn.Module):
    """A trained model that is not trained further, and a layer behind it."""

    def __init__(self):
        super().__init__()
        self.base = Net().requires_grad_(False)
        self.head = nn.Linear(3, 2)

    def forward(self, x, step=0):
        return self.head(self.base(x))


def tuned(kind, seed):
    torch.manual_seed(seed)
    net = Tuned()
    if kind == "fsdp2":
        for part in (net.base, net):
            fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **AVERAGED)
        return net, adamw(net)
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Net}), use_orig_params="orig" in kind, device_id=CPU)
    return model, adamw(model)


def check_tuned(rank, world, url):
    """The part gets what was saved of it under the part's name, nothing else changes; and the whole is resumed."""
    for number, layout in enumerate(("fsdp1 flat", "fsdp1 orig", "fsdp2")):
        base = wrap(layout, Net())
        optimizer = adamw(base)
        train(base, optimizer, range(2))
        sf.save(f"{url}/{number}", state_of(base, optimizer))
        for kind in ("fsdp1 orig", "fsdp1 flat", "fsdp2"):
            model, head = tuned(kind, 1)
            before = model_of(whole_of(model, head))
            sf.load(
                f"{url}/{number}",
                {"model": model},
                only="model/base.*",
                rename=lambda name: name.replace("model/", "model/base."),
            )
            expected = {name.replace("model/", "model/base."): one for name, one in model_of(whole_of(base)).items()}
            assert unequal(model_of(whole_of(model, head)), before | expected) == [], (layout, kind)
            train(model, head, range(2))
            place = f"{url}/{number}-{kind}"
            sf.save(place, state_of(model, head))
            for other in {kind, "fsdp2", "fsdp1 orig"}:
                again = tuned(other, 2)
                sf.load(place, state_of(*again))
                found = whole_of(*again)
                assert unequal(found, whole_of(model, head)) == [], (layout, kind, other)
                assert {name for name in found if name.startswith("optimizer/") and ".base." in name} == set()


def test_a_trained_model_in_another_one(ranks, tmp_path):
    ranks(2)(check_tuned, f"{tmp_path}")


# Models that are made without memory


def check_meta(rank, world, url):
    """FSDP1 gives a model memory as it shards it; of FSDP2 one part is loaded while the rest has none."""
    model = wrap("fsdp2", Net())
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    sf.save(url, state_of(model, optimizer))
    for use_orig_params in (True, False):
        with torch.device("meta"):
            net = Net()
        into = FSDP(
            net,
            auto_wrap_policy=ModuleWrapPolicy({Unit}),
            use_orig_params=use_orig_params,
            device_id=CPU,
            param_init_fn=lambda part: part.to_empty(device=CPU, recurse=False),
        )
        its_optimizer = adamw(into)
        sf.load(url, state_of(into, its_optimizer))
        assert unequal(whole_of(into, its_optimizer), whole_of(model, optimizer)) == [], use_orig_params
    with torch.device("meta"):
        net = Net()
    into = wrap("fsdp2", net)
    for name in ("first", "second", "third", "head"):
        into.get_submodule(name).to_empty(device="cpu")
        sf.load(url, {"model": into}, only=f"model/{name}.*")
    assert unequal(whole_of(into), model_of(whole_of(model))) == []


def test_models_without_memory(ranks, tmp_path):
    ranks(2)(check_meta, f"{tmp_path}/checkpoint")
