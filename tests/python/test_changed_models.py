"""Models that programs convert, replace or wrap again, and what modules add to their state, under FSDP1, FSDP2 and
DistributedDataParallel. PyTorch gathers what should be saved and loaded."""

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import known, same_bits
from older import AVERAGED
from test_scenarios import Buffers
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim.swa_utils import AveragedModel
from units import WIDTH, Net, Unit, adamw, bare, clean, state_of, train, unequal, whole_of, wrap, wrap_fsdp2

CPU = torch.device("cpu")


def model_of(whole):
    """What is not an optimizer's of what PyTorch gathered."""
    return {name: tensor for name, tensor in whole.items() if name.startswith("model/")}


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


# Parameters that are replaced


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


class Counting(nn.Linear):
    """A layer with state that is no tensor, another one on every rank."""

    def __init__(self, seen) -> None:
        super().__init__(4, 6)
        self.seen = seen

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def check_extra_state(rank, world, url):
    def make(seen, amax):
        model = nn.Sequential(Counting(seen), Counting({"amax": amax}))
        return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))

    sf.save(url, {"model": make({"rank": rank, "history": [1, rank]}, torch.tensor([0.5, 2.0]))})
    model = make(None, torch.zeros(2))
    sf.load(url, {"model": model})
    assert model[0].seen == {"rank": rank, "history": [1, rank]}
    assert model[1].seen["amax"].tolist() == [0.5, 2.0]


def test_extra_state(ranks, tmp_path):
    ranks(2)(check_extra_state, f"{tmp_path}/checkpoint")


# Wrappers in wrappers


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
