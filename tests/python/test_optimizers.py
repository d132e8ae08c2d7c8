"""State of other optimizers than fused AdamW under any layout: AdamW that is not fused, SGD with momentum, and Muon
beside AdamW. The matrices of AdamW are in test_reshard.py, test_fsdp.py and test_pipelines.py."""

import pytest
import shardfast as sf
import torch
from layouts import PAIRS_ONE_IN, build, differing, fill, same_bits, spoil
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Shard

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
