"""State of optimizers: of others than fused AdamW under any layout, of another shape than its parameter, less or under
other names than here. The matrices of fused AdamW are in test_reshard.py, test_fsdp.py and test_pipelines.py."""

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import PAIRS_ONE_IN, build, differing, fill, same_bits, spoil
from nets import copies_of, net, same, step
from older import AVERAGED
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

HAS_MUON = hasattr(torch.optim, "Muon")

WITHOUT_FSDP1 = {
    1: ["plain"],
    2: ["ddp", "fsdp", "tp", "interleaved", "ep"],
    4: ["hsdp", "fsdp_tp", "pp_fsdp", "interleaved_fsdp", "pp_tp", "interleaved_tp", "ep_fsdp"],
}
"""Layouts by number of ranks. Muon takes no flat parameters."""

OTHERS = 4 if PAIRS_ONE_IN == 1 else 1

LAYOUTS_OF = {
    1: ["plain"],
    2: [*WITHOUT_FSDP1[2], "zero1", "fsdp1_full_shard_orig", "fsdp1_shard_grad_op_flat"],
    4: [*WITHOUT_FSDP1[4], "pp_ddp", "fsdp1_hybrid_shard_orig", "fsdp1_full_shard_flat"],
}


def layouts_of(kind, world):
    return (WITHOUT_FSDP1 if kind == "muon" else LAYOUTS_OF)[world]


def state_of(model, optimizer):
    return {"model": model, "optimizer": optimizer}


def save_all(rank, world, url, kinds):
    for kind in kinds:
        for layout in layouts_of(kind, world):
            model, optimizer = build(layout, kind=kind)
            fill(model, optimizer)
            sf.save(f"{url}/{kind}/{world}/{layout}", state_of(model, optimizer))


def load_all(rank, world, url, kinds, pairs_with):
    """Each layout loads some of what was saved, in turn into an optimizer that has no state yet and one that has.

    ``pairs_with`` says for each kind the kind whose checkpoints it loads.
    """
    for kind in kinds:
        saved = [(ranks, layout) for ranks in (2, 4) for layout in layouts_of(kind, ranks)]
        for number, layout in enumerate(layouts_of(kind, world)):
            fresh, filled = build(layout, seed=1, kind=kind), build(layout, seed=2, kind=kind)
            fill(*filled)
            # Every layout is loaded by some, and each loads as many others.
            for other in range(OTHERS) if world > 1 else range(len(saved)):
                ranks, one = saved[(number * OTHERS + other) % len(saved)]
                target = filled if (number + other) % 2 else fresh
                spoil(*target, keeps_state=target is filled)
                sf.load(f"{url}/{pairs_with[kind]}/{ranks}/{one}", state_of(*target))
                assert differing(*target) == [], (kind, one, layout)


# The table of optimizers has all of them, in some layouts.
KINDS = ["adamw", "fused adamw"] + ["sgd"] * (PAIRS_ONE_IN == 1) + ["muon"] * HAS_MUON
OTHER = {"adamw": "fused adamw", "fused adamw": "adamw", "sgd": "sgd", "muon": "muon"}


def test_every_kind_of_optimizer_under_other_layouts(ranks, tmp_path):
    url = f"{tmp_path}"
    for world in (2, 4):
        ranks(world)(save_all, url, KINDS)
    load_all(0, 1, url, KINDS, OTHER)
    for world in (2, 4):
        ranks(world)(load_all, url, KINDS, OTHER)


def check_lost_placements(rank, world, url):
    model, optimizer = build("fsdp_tp")
    fill(model, optimizer)
    strided = [one for one in model.parameters() if any(type(p).__name__ == "_StridedShard" for p in one.placements)]
    assert strided, "FSDP2 cuts none of them below tensor parallelism"
    sf.save(f"{url}/sound", state_of(model, optimizer))
    moment = optimizer.state[strided[0]]["exp_avg_sq"]
    optimizer.state[strided[0]]["max_exp_avg_sq"] = DTensor.from_local(
        *(moment.to_local(), moment.device_mesh, [Shard(0), Shard(0)]), shape=moment.shape, stride=moment.stride()
    )
    with pytest.raises(sf.Invalid, match=r"Adam.* has 'max_exp_avg_sq' in its state, which says \(Shard\(dim=0\), "):
        sf.save(f"{url}/lost", state_of(model, optimizer))


def test_state_that_lost_where_its_elements_are_is_refused(ranks, tmp_path):
    ranks(4)(check_lost_placements, f"{tmp_path}")


# Muon and FSDP1


def check_muon_under_fsdp1(rank, world, url):
    """A flat parameter has no matrices for Muon. Where FSDP1 does not shard, it has."""
    model, optimizers = build("plain", kind="muon")
    fill(model, optimizers)
    sf.save(f"{url}/plain", state_of(model, optimizers))
    for layout in ("fsdp1_full_shard_orig", "fsdp1_full_shard_flat"):
        sharded, its_optimizer = build(layout, seed=1)
        with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
            torch.optim.Muon(sharded.parameters())
        sf.load(f"{url}/plain", {"model": sharded}, only="model")
        with FSDP.summon_full_params(sharded):
            assert unequal(model, sharded) == []
        with pytest.raises(sf.Invalid, match=r"another class of optimizer"):
            sf.load(f"{url}/plain", state_of(sharded, its_optimizer))
    whole, its_optimizers = build("fsdp1_no_shard_orig", seed=2, kind="muon")
    sf.load(f"{url}/plain", state_of(whole, its_optimizers))
    assert unequal(model, whole) == []
    for one, other in zip(optimizers, its_optimizers, strict=True):
        for mine, its in zip(parameters_of_groups(one), parameters_of_groups(other), strict=True):
            assert one.state[mine].keys() == other.state[its].keys()
            assert all(same_bits(value, other.state[its][name]) for name, value in one.state[mine].items())
    sf.save(f"{url}/whole", state_of(whole, its_optimizers))
    for layout in ("plain", "fsdp"):
        into = build(layout, seed=3, kind="muon")
        sf.load(f"{url}/whole", state_of(*into))
        assert differing(*into) == [], layout


def parameters_of_groups(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def unequal(model, wrapped):
    """Names of a model's parameters that differ in the same model under FSDP1, whose parameters are whole now."""
    pairs = zip(model.named_parameters(), wrapped.parameters(), strict=True)
    return [name for (name, one), other in pairs if not same_bits(one, other)]


@pytest.mark.skipif(not HAS_MUON, reason=f"torch {torch.__version__} has no Muon")
def test_muon_and_fsdp1(ranks, tmp_path):
    ranks(2)(check_muon_under_fsdp1, f"{tmp_path}")


def test_a_group_without_parameters_keeps_its_hyperparameters(tmp_path):
    def made(lr):
        model = torch.nn.Linear(2, 2)
        groups = [{"params": list(model.parameters()), "lr": lr}, {"params": [], "lr": 2 * lr, "weight_decay": lr}]
        return {"model": model, "optimizer": torch.optim.AdamW(groups)}

    sf.save(tmp_path / "a", made(0.1))
    state = made(0.5)
    sf.load(tmp_path / "a", state)
    assert [(group["lr"], group["weight_decay"]) for group in state["optimizer"].param_groups] == [
        (0.1, 0.01),
        (0.2, 0.1),
    ]


# State of another shape than its parameter


class RowWise(torch.optim.Optimizer):
    """Factored second moments, one number for each row and one for each column, as CAME and Adafactor have."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim < 2:
                    continue
                state, square = self.state[parameter], parameter.grad.square() + 1e-3
                row, column = square.mean(dim=-1), square.sum(dim=0) / len(square)  # gloo has no averages
                if isinstance(column, DTensor):
                    column = column.redistribute(placements=[Replicate()])
                if not state:
                    state["row"], state["column"] = torch.zeros_like(row), torch.zeros_like(column)
                state["row"].mul_(0.9).add_(row, alpha=0.1)
                state["column"].mul_(0.9).add_(column, alpha=0.1)
                state["pair"] = state.get("pair", torch.zeros(2)) + 1
                scale = state["row"].unsqueeze(-1) * state["column"]
                parameter.add_(parameter.grad / scale.sqrt(), alpha=-group["lr"])


def sharded(seed):
    model = net(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **AVERAGED)
    return fully_shard(model, mesh=mesh, **AVERAGED), mesh


def check_factored(rank, world, url, saved_whole):
    model, _ = sharded(0)
    if saved_whole:
        model = net(0)
    optimizer = RowWise(model.parameters())
    step(model, optimizer)
    if saved_whole:
        del model, optimizer  # saved by the test, in one process
    else:
        sf.save(url, {"model": model, "optimizer": optimizer})
    fresh, mesh = sharded(1)
    other = RowWise(fresh.parameters())
    sf.load(url, {"model": fresh, "optimizer": other})
    state = other.state[fresh[0].weight]
    assert state["row"].placements == (Shard(0),) and state["row"].device_mesh == mesh
    assert state["column"].placements == (Replicate(),)
    assert saved_whole or type(state["pair"]) is torch.Tensor
    step(fresh, other, seed=1)
    return [p.full_tensor().tolist() for p in fresh.parameters()]


@pytest.mark.parametrize("saved_whole", [False, True])
def test_factored_moments_are_sharded_again(ranks, tmp_path, saved_whole):
    model = net(0)
    optimizer = RowWise(model.parameters())
    step(model, optimizer)
    if saved_whole:
        for entries in optimizer.state.values():
            del entries["pair"]
        sf.save(tmp_path / "one", {"model": model, "optimizer": optimizer})
    step(model, optimizer, seed=1)
    expected = [p.detach() for p in model.parameters()]
    for found in ranks(2)(check_factored, f"{tmp_path}/one", saved_whole):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one), other)


# Going back, renaming, habits


@pytest.mark.parametrize("strict", [True, False])
def test_going_back_to_less_optimizer_state_leaves_nothing_newer(tmp_path, strict):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    state = {"model": model, "optimizer": optimizer}
    sf.save(tmp_path / "0", state)
    step(model, optimizer)
    del optimizer.state[model[0].weight]["max_exp_avg_sq"]
    del optimizer.state[model[2].bias]
    before = copies_of(optimizer)
    sf.save(tmp_path / "1", state)
    for group in optimizer.param_groups:
        optimizer.state = type(optimizer.state)(dict)
        group["amsgrad"] = True
    step(model, optimizer, seed=1)
    forecast = sf.plan_load(tmp_path / "1", state, strict=strict)
    plan = sf.load(tmp_path / "1", state, strict=strict)
    dropped = {"optimizer/state.0.weight.max_exp_avg_sq"}
    dropped |= {f"optimizer/state.2.bias.{name}" for name in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    assert set(plan.dropped) == set(forecast.dropped) == dropped and not plan.missing and not forecast.problems
    assert same(copies_of(optimizer), before)
    assert model[2].bias not in optimizer.state
    sf.load(tmp_path / "0", state, strict=strict)
    assert not optimizer.state
    step(model, optimizer)  # makes it anew


def test_a_load_of_something_else_drops_nothing(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    sf.save(tmp_path / "0", state)
    sf.save(tmp_path / "part", {"model": model, "optimizer": torch.optim.AdamW(model[0].parameters())})
    step(model, optimizer)
    sf.load(tmp_path / "0", state, only="model")
    assert len(optimizer.state) == 4
    # Of the parameters that it does not speak of, the checkpoint does not say that they had no state.
    with pytest.raises(sf.Invalid, match=r"no saved parameter group has '2\.weight'"):
        sf.load(tmp_path / "part", state)
    plan = sf.load(tmp_path / "part", state, strict=False)
    assert set(optimizer.state) == {model[2].weight, model[2].bias}
    assert {name.rpartition(".")[0] for name in plan.missing} == {"optimizer/state.2.weight", "optimizer/state.2.bias"}
    assert {name.rpartition(".")[0] for name in plan.dropped} == {"optimizer/state.0.weight", "optimizer/state.0.bias"}


def pair(seed):
    g, d = net(seed), net(seed + 1)
    return {
        "G": g,
        "D": d,
        "optimizer_G": torch.optim.AdamW(g.parameters()),
        "optimizer_D": torch.optim.SGD(d.parameters(), lr=0.1, momentum=0.9),
    }


@pytest.mark.parametrize("as_function", [False, True])
def test_an_optimizer_follows_the_module_whose_parameters_it_owns(tmp_path, as_function):
    state = pair(0)
    step(state["G"], state["optimizer_G"])
    step(state["D"], state["optimizer_D"])
    sf.save(tmp_path / "one", state)
    fresh = pair(5)
    fresh["G"] = nn.Sequential(nn.Identity(), *fresh["G"])  # every layer of G has moved by one
    moved = {f"G/{n}.{part}": f"G/{n + 1}.{part}" for n in (0, 2) for part in ("weight", "bias")}
    sf.load(tmp_path / "one", fresh, rename=(lambda name: moved.get(name, name)) if as_function else moved)
    for name in ("G", "D"):
        assert same([p.detach() for p in fresh[name].parameters()], [p.detach() for p in state[name].parameters()])
        ours, theirs = fresh[f"optimizer_{name}"], state[f"optimizer_{name}"]
        assert same(copies_of(ours), copies_of(theirs)) and copies_of(theirs)[0]


def test_a_dict_of_parameters_names_them_for_an_optimizer(tmp_path):
    """Only what is trained is saved: adapters beside a frozen model."""
    model, fresh = net(), net(1)
    for one in (model, fresh):
        one[0].requires_grad_(False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values())
    for number in range(3):
        step(model, optimizer, seed=number)
        sf.save_async(tmp_path / f"{number}", {"model": trained, "optimizer": optimizer}).committed()
    others = {name: p for name, p in fresh.named_parameters() if p.requires_grad}
    other = torch.optim.AdamW(others.values())
    sf.load(tmp_path / "2", {"model": others, "optimizer": other})
    assert same(copies_of(other), copies_of(optimizer)) and copies_of(other)[0]
    assert torch.equal(fresh[2].weight, model[2].weight) and not torch.equal(fresh[0].weight, model[0].weight)


@pytest.mark.parametrize("has_state", [False, True])
def test_another_class_of_optimizer_is_unexpected(tmp_path, has_state):
    model = net()
    adam = torch.optim.Adam(model.parameters())
    step(model, adam)
    sf.save(tmp_path / "adam", {"model": model, "optimizer": adam})
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if has_state:
        step(model, sgd)
    before = copies_of(sgd)
    state = {"model": model, "optimizer": sgd}
    with pytest.raises(sf.Invalid, match=r"unexpected: the state of '0.weight' was saved by .*Adam, and here .*SGD"):
        sf.load(tmp_path / "adam", state)
    plan = sf.load(tmp_path / "adam", state, strict=False)
    assert "optimizer/state.0.weight.exp_avg" in plan.unexpected
    assert same(copies_of(sgd), before) and sgd.param_groups[0]["lr"] == 0.5
    step(model, sgd)
    # One algorithm under two names.
    sf.load(tmp_path / "adam", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


def test_a_fresh_optimizer_loaded_in_inference_mode_can_be_trained_with(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    sf.save(tmp_path / "one", {"model": model, "optimizer": optimizer})
    other = torch.optim.AdamW(model.parameters())
    with torch.inference_mode():
        sf.load(tmp_path / "one", {"model": model, "optimizer": other})
    assert not any(value.is_inference() for entries in copies_of(other) for value in entries.values())
    step(model, other)
