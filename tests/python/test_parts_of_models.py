"""Optimizers of a part of a model, models with more or less than was saved, models that are parts of others, and models
without memory. PyTorch gathers what should be saved and loaded."""

import inspect
import itertools

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import known, local, same_bits
from older import AVERAGED
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from units import WIDTH, Net, Unit, adamw, bare, state_of, train, unequal, whole_of, wrap, wrap_fsdp2

CPU = torch.device("cpu")


def model_of(whole):
    """What is not an optimizer's of what PyTorch gathered."""
    return {name: tensor for name, tensor in whole.items() if name.startswith("model/")}


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


# Optimizers


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
    with pytest.raises(sf.Invalid, match=r"model/\S+: a tensor on the meta device has no memory"):
        sf.load(url, {"model": into}, only="model", timeout_s=20)
    assert sf.plan_load(url, {"model": into}, only="model").problems == []
    for name in ("first", "second", "third", "head"):
        into.get_submodule(name).to_empty(device="cpu")
        sf.load(url, {"model": into}, only=f"model/{name}.*")
    assert unequal(whole_of(into), model_of(whole_of(model))) == []


def test_models_without_memory(ranks, tmp_path):
    ranks(2)(check_meta, f"{tmp_path}/checkpoint")
