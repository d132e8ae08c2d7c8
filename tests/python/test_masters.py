"""Copies in fp32 of 16-bit parameters: a load takes the most exact bits of the checkpoint, without an argument."""

import logging

import pytest
import shardfast as sf
import torch
from shardfast.state.catalog import SavedAlias, SavedObject, SavedTensor
from shardfast.state.entries import BundleEntry
from shardfast.state.masters import Masters
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")


class Exact(torch.optim.AdamW):
    """Keeps a copy in fp32 of each 16-bit parameter, from the first step on."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.rand(parameter.shape) * parameter.detach().abs().float() * 2**-11
                self.state[parameter]["master"] = parameter.detach().float() + noise


class Tied(nn.Module):
    """Two names of one tensor beside another tensor."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.body(self.embedding(x)))


def trained(kind, dtype, seed=0):
    torch.manual_seed(seed)
    model = Tied().to(dtype)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.arange(7)).float().square().sum().backward()
    optimizer.step()
    return model, optimizer


def fresh(dtype, seed=1):
    torch.manual_seed(seed)
    model = Tied().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.2)


@pytest.fixture
def saved(tmp_path):
    """The URL of a checkpoint with masters, and what was saved."""
    model, optimizer = trained(Exact, torch.bfloat16)
    url = tmp_path / "bf16"
    sf.save(url, {"model": model, "optimizer": optimizer})
    return url, model, optimizer


def expect_moments(model, optimizer, into, loaded):
    pairs = list(zip(model.parameters(), into.parameters(), strict=True))
    assert pairs
    for parameter, here in pairs:
        for moment in MOMENTS:
            one, other = optimizer.state[parameter][moment], loaded.state[here][moment]
            assert one.dtype is other.dtype
            assert torch.equal(one, other)
        assert "master" not in loaded.state[here]


def test_an_fp32_model_gets_the_bits_of_the_masters(saved):
    url, model, optimizer = saved
    into, loaded = fresh(torch.float32)
    planned = sf.plan_load(url, {"model": into, "optimizer": loaded})
    assert planned.problems == []
    plan = sf.load(url, {"model": into, "optimizer": loaded})
    for parameter, here in zip(model.parameters(), into.parameters(), strict=True):
        master = optimizer.state[parameter]["master"]
        assert torch.equal(here, master)
        assert not torch.equal(master, parameter.float())
    assert into.head.weight is into.embedding.weight
    expect_moments(model, optimizer, into, loaded)
    assert plan.masters == planned.masters
    assert (
        "model/body.weight: BF16 in the checkpoint with a master; it becomes optimizer/state.body.weight.master"
        in plan.masters
    )
    assert "masters, or none, here or there (4):" in str(plan)
    assert (plan.cast, plan.missing, plan.unexpected) == ({}, [], [])


def test_the_model_alone_gets_them_too(saved):
    url, model, optimizer = saved
    into, _ = fresh(torch.float32)
    sf.load(url, {"net": into}, only="net", rename=lambda name: name.replace("model/", "net/"))
    for parameter, here in zip(model.parameters(), into.parameters(), strict=True):
        assert torch.equal(here, optimizer.state[parameter]["master"])


def test_a_16_bit_model_gets_the_16_bits(saved):
    url, model, optimizer = saved
    into, loaded = fresh(torch.bfloat16)
    plan = sf.load(url, {"model": into, "optimizer": loaded})
    for parameter, here in zip(model.parameters(), into.parameters(), strict=True):
        assert torch.equal(here, parameter)
    expect_moments(model, optimizer, into, loaded)
    assert (plan.masters, plan.missing, plan.unexpected) == ([], [], [])


def test_a_training_in_16_bits_goes_on_with_moments_of_its_type(saved):
    url, model, optimizer = saved
    for parameter in model.parameters():  # as what steps masters has them
        optimizer.state[parameter] |= {name: optimizer.state[parameter][name].float() + 1e-5 for name in MOMENTS}
    sf.save(f"{url}, moments in fp32", {"model": model, "optimizer": optimizer})
    into, loaded = fresh(torch.bfloat16)
    plan = sf.load(f"{url}, moments in fp32", {"model": into, "optimizer": loaded}, cast=True)
    assert plan.cast["optimizer/state.body.weight.exp_avg"] == ("F32", "BF16")
    for parameter, here in zip(model.parameters(), into.parameters(), strict=True):
        assert torch.equal(here, parameter)
        for name in MOMENTS:
            assert torch.equal(loaded.state[here][name], optimizer.state[parameter][name].bfloat16())
    into(torch.arange(7)).float().sum().backward()
    loaded.step()


def test_what_keeps_masters_gets_them_back(saved):
    url, model, optimizer = saved
    into, loaded = trained(Exact, torch.bfloat16, seed=1)
    sf.load(url, {"model": into, "optimizer": loaded})
    lazy = Exact(into.parameters(), lr=0.2)
    sf.load(url, {"model": into, "optimizer": lazy})
    for parameter, here in zip(model.parameters(), into.parameters(), strict=True):
        for one in (loaded, lazy):
            assert torch.equal(one.state[here]["master"], optimizer.state[parameter]["master"])


def test_other_differences_of_type_stay_errors(saved, tmp_path):
    url, *_ = saved
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(sf.Invalid, match=r"dtype: model/body\.weight is BF16 in the checkpoint and F"):
            sf.load(url, {"model": fresh(dtype)[0]}, only="model")
    full, optimizer = trained(torch.optim.AdamW, torch.float32)
    sf.save(tmp_path / "fp32", {"model": full, "optimizer": optimizer})
    with pytest.raises(sf.Invalid, match=r"dtype: model/body\.weight is F32 in the checkpoint and BF16 here"):
        sf.load(tmp_path / "fp32", {"model": fresh(torch.bfloat16)[0]}, only="model")
    half, optimizer = trained(torch.optim.AdamW, torch.bfloat16)
    sf.save(tmp_path / "plain", {"model": half, "optimizer": optimizer})
    with pytest.raises(sf.Invalid, match=r"dtype: model/body\.weight is BF16 in the checkpoint and F32 here"):
        sf.load(tmp_path / "plain", {"model": fresh(torch.float32)[0]}, only="model")


def test_an_average_of_the_weights_has_no_master(tmp_path):
    model, optimizer = trained(Exact, torch.bfloat16)
    average = Tied().to(torch.bfloat16)
    sf.save(tmp_path / "a", {"model": model, "average": average, "optimizer": optimizer})
    into, loaded = fresh(torch.float32)
    state = {"model": into, "average": Tied(), "optimizer": loaded}
    for arguments in ({}, {"only": ["model", "average"]}):
        with pytest.raises(sf.Invalid) as raised:
            sf.load(tmp_path / "a", state, **arguments)
        assert "dtype: average/body.weight is BF16 in the checkpoint and F32 here" in str(raised.value)
        assert "dtype: model/" not in str(raised.value)
    # Whose it is only an optimizer of the state can tell.
    with pytest.raises(sf.Invalid, match=r"dtype: average/body\.weight is BF16"):
        sf.load(tmp_path / "a", {"average": Tied()}, only="average")


def test_an_optimizer_that_is_not_in_the_state_is_said_as_one(saved):
    url, *_ = saved
    with pytest.raises(sf.Invalid, match=r"unexpected: optimizer, all of it"):
        sf.load(url, {"model": fresh(torch.float32)[0]})


# The rule itself


def tensor(index, key, name, dtype, shape=(4, 3), layout=""):
    return SavedTensor(index, key, name, layout, dtype, shape, 0)


def groups(index, key="optimizer", prefix=""):
    return SavedObject(index, key, f"{prefix}param_groups", "", ((((0, 1),), 10),))


def entry(key="optimizer", prefix="", owned=None, exact=None):
    frozen = ({of: frozenset(fqns) for of, fqns in (given or {}).items()} for given in (owned, exact))
    return BundleEntry(key, prefix, None, "", None, None, *frozen)


def rule(saved, *entries, selects=lambda name: True):
    return Masters(saved, {(leaf.key, leaf.name): leaf for leaf in saved}, entries, selects)


MODEL = {"model": ["w"]}


def test_rounding_and_masters_that_the_checkpoint_lacks():
    saved = [tensor(0, "model", "w", "F32"), groups(1)]
    masters = rule(saved, entry(owned=MODEL, exact=MODEL))
    assert masters.stand_in("optimizer", "state.w.master") is saved[0]
    chosen = masters.choose(saved[0], "model", "w", "BF16", None)
    assert (chosen.saved, chosen.converts) == (saved[0], True)
    assert (
        chosen.note == "model/w: F32 in the checkpoint; the master here becomes its bits, the parameter their rounding"
    )
    assert masters.rounded == []
    assert masters.lacks(entry(), "w")
    # A rank without a run of the parameter says the same.
    assert rule(saved, entry(exact=MODEL)).choose(saved[0], "model", "w", "BF16", None) == chosen


def test_a_second_name_is_rounded_as_the_first():
    saved = [tensor(0, "model", "w", "F32"), SavedAlias(1, "model", "out", "", "model", "w"), groups(2)]
    masters = rule(saved, entry(owned=MODEL, exact=MODEL))
    assert not masters.choose(saved[0], "model", "out", "BF16", 0).converts
    assert masters.choose(saved[0], "model", "w", "BF16", None).converts
    assert masters.choose(saved[0], "model", "out", "BF16", 0).converts
    assert not masters.choose(saved[0], "model", "out", "BF16", None).converts


def test_16_bits_alone():
    saved = [tensor(0, "model", "w", "BF16"), groups(1)]
    masters = rule(saved, entry(owned=MODEL, exact=MODEL))
    chosen = masters.choose(saved[0], "model", "w", "BF16", None)
    assert chosen.note == (
        "model/w: BF16 in the checkpoint without a master (it was trained in BF16); master and parameter here become "
        "the 16-bit value"
    )
    assert masters.choose(saved[0], "optimizer", "state.w.master", "F32", None).converts
    assert masters.rounded == ["model/w"]
    assert masters.warning().startswith("model/w: saved in 16 bits without a master")
    # Another 16-bit type stays a difference.
    assert masters.choose(saved[0], "model", "w", "F16", None) == (saved[0], "", False)


@pytest.mark.parametrize(
    "saved",
    [
        [tensor(0, "model", "w", "F32"), groups(1), tensor(2, "optimizer", "state.w.master", "F32")],
        [tensor(0, "model", "w", "F32")],
    ],
    ids=["a master", "no optimizer"],
)
def test_the_rule_leaves_alone(saved):
    masters = rule(saved, entry(owned=MODEL, exact=MODEL))
    assert masters.stand_in("optimizer", "state.w.master") is None
    assert not masters.choose(saved[0], "model", "w", "BF16", None).converts


def test_what_only_leaves_out_is_not_filled():
    saved = [tensor(0, "model", "w", "F32"), groups(1)]
    masters = rule(saved, entry(owned=MODEL, exact=MODEL), selects=lambda name: name.startswith("model/"))
    assert masters.stand_in("optimizer", "state.w.master") is None
    assert not masters.choose(saved[0], "model", "w", "BF16", None).converts


def test_of_several_optimizers_that_of_the_key():
    saved = [
        *(tensor(0, "one", "w", "BF16"), tensor(1, "two", "w", "BF16")),
        *(groups(2, "first"), groups(3, "second")),
        *(tensor(4, "first", "state.w.master", "F32"), tensor(5, "second", "state.w.master", "F32")),
    ]
    both = rule(saved, entry("first", owned={"one": ["w"]}), entry("second", owned={"two": ["w"]}))
    assert both.of(saved[0], "one") is saved[4]
    assert both.of(saved[1], "two") is saved[5]
    # Without the optimizers nothing tells whose it is; one that belongs to another key is not taken either.
    assert rule(saved).of(saved[0], "one") is None
    assert rule(saved, entry("second", owned={"two": ["w"]})).of(saved[0], "one") is None
    assert rule([saved[0], saved[2], saved[4]]).of(saved[0], "one") is saved[4]


def test_a_master_is_of_the_shape_of_its_parameter():
    saved = [tensor(0, "model", "w", "BF16"), groups(1), tensor(2, "optimizer", "state.w.master", "F32", (12,))]
    assert rule(saved, entry(owned=MODEL)).of(saved[0], "model") is None


def test_only_an_optimizer_has_masters():
    saved = [tensor(0, "model", "w", "BF16"), tensor(1, "other", "state.w.master", "F32")]
    assert rule(saved).of(saved[0], "model") is None
    nested = [
        tensor(0, "train", "net.w", "BF16"),
        groups(1, "train", "adam."),
        tensor(2, "train", "adam.state.net.w.master", "F32"),
    ]
    assert rule(nested, entry("train", "adam.", owned={"train": ["net.w"]})).of(nested[0], "train") is nested[2]


def test_a_second_name_has_the_master_of_the_first():
    saved = [
        *(tensor(0, "model", "w", "BF16"), SavedAlias(1, "head", "out", "", "model", "w")),
        *(groups(2), tensor(3, "optimizer", "state.w.master", "F32")),
    ]
    masters = rule(saved, entry(owned=MODEL))
    assert masters.choose(saved[0], "model", "w", "F32", None).saved is saved[3]
    # The state's optimizer has it under the first name alone.
    assert masters.choose(saved[0], "head", "out", "F32", 3).saved is saved[3]
    assert masters.choose(saved[0], "head", "out", "F32", None).saved is saved[0]


def test_a_master_that_is_not_needed():
    saved = [tensor(0, "model", "w", "BF16"), groups(1), tensor(2, "optimizer", "state.w.master", "F32")]
    plain, keeping = entry(owned=MODEL), entry(owned=MODEL, exact=MODEL)
    assert rule(saved, plain).is_superseded(saved[2], plain, "state.w.master")
    assert not rule(saved, keeping).is_superseded(saved[2], keeping, "state.w.master")
    assert not rule(saved, plain).is_superseded(saved[0], plain, "w")


def test_the_log_tells_of_16_bits_once(tmp_path, caplog, monkeypatch):
    """An optimizer of the state that says it keeps masters: none of PyTorch's does."""
    from shardfast.adapters.torch.optimizers import Optimizers

    half, optimizer = trained(torch.optim.AdamW, torch.bfloat16)
    sf.save(tmp_path / "plain", {"model": half, "optimizer": optimizer})
    into, loaded = trained(Exact, torch.bfloat16, seed=1)
    monkeypatch.setattr(Optimizers, "masters", lambda self: self.parameters)
    monkeypatch.setattr(Optimizers, "drops", lambda self, name: not name.endswith((".master", "param_groups")))
    with caplog.at_level(logging.WARNING, logger="shardfast"):
        plan = sf.load(tmp_path / "plain", {"model": into, "optimizer": loaded})
    said = [record.getMessage() for record in caplog.records if "master" in record.getMessage()]
    assert len(said) == 1
    assert "and 2 more" in said[0]
    assert len(plan.masters) == 3
    for parameter, here in zip(half.parameters(), into.parameters(), strict=True):
        assert torch.equal(here, parameter)
        assert torch.equal(loaded.state[here]["master"], parameter.float())
