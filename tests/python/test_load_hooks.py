"""What PyTorch notices of a load: version counters rise, hooks run, modules that load by themselves do."""

import pytest
import shardfast as sf
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard


def test_a_backward_through_tensors_loaded_in_between_raises(tmp_path):
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))
    plain = torch.ones(70_000)
    state = {"model": model, "plain": {"w": plain}}
    sf.save(tmp_path / "one", state)
    loss = model(torch.ones(2, 300)).sum()
    versions = [p._version for p in model.parameters()]
    sf.load(tmp_path / "one", state)
    assert all(p._version > version for p, version in zip(model.parameters(), versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model(torch.ones(2, 300)).sum().backward()
    with torch.inference_mode():
        made = {"plain": {"w": torch.zeros(70_000)}}
        sf.load(tmp_path / "one", made, only="plain/w", strict=False)  # has no counter
    assert bool(made["plain"]["w"].all())


class Caching(nn.Linear):
    """Keeps what it computes from its weight."""

    def __init__(self):
        super().__init__(3, 2)
        self.calls = []
        self.refresh()

    def refresh(self):
        self.cache = self.weight.detach().sum().item()

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        super()._load_from_state_dict(state_dict, prefix, *rest)
        assert f"{prefix}weight" in state_dict and f"{prefix}bias" in state_dict
        self.calls.append("method")
        self.refresh()


def before_load(module, state_dict, prefix, *rest):
    assert set(state_dict) >= {f"{prefix}weight", f"{prefix}bias"}
    module.calls.append("before")


def after_load(module, incompatible):
    assert incompatible.missing_keys == [] == incompatible.unexpected_keys
    module.calls.append("after")


def test_modules_that_load_by_themselves_and_load_hooks_do(tmp_path):
    sf.save(
        tmp_path / "one", {"model": nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(4, 4), "c": nn.Linear(3, 2)})}
    )
    model = nn.ModuleDict({"a": Caching(), "b": nn.Linear(4, 4), "c": nn.Linear(3, 2)})
    model["c"].calls = []
    model["c"].register_load_state_dict_pre_hook(before_load)
    model["c"].register_load_state_dict_post_hook(after_load)
    sf.load(tmp_path / "one", {"model": model})
    assert model["a"].calls == ["method"] and model["a"].cache == model["a"].weight.sum().item()
    assert model["c"].calls == ["before", "after"]
    with torch.no_grad():
        model["a"].weight.zero_()
    with pytest.raises(sf.Invalid):
        sf.load(tmp_path / "one", {"model": nn.Linear(1, 1), "more": model})
    assert model["a"].calls == ["method"], "nothing was loaded"


class Converting(nn.Module):
    """Holds one thing and saves another, which its own method turns back."""

    def __init__(self, value):
        super().__init__()
        self.packed = torch.full((40_000,), value)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}unpacked"] = self.packed * 2
        destination[f"{prefix}scale"] = torch.tensor(2.0)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.packed = state_dict.pop(f"{prefix}unpacked") / state_dict.pop(f"{prefix}scale")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_what_a_module_converts_comes_back_whole(tmp_path):
    sf.save(tmp_path / "one", {"model": nn.Sequential(nn.Linear(2, 2), Converting(3.0))})
    model = nn.Sequential(nn.Linear(2, 2), Converting(0.0))
    sf.load(tmp_path / "one", {"model": model})
    assert bool((model[1].packed == 3.0).all())


def test_hooks_of_optimizers_run_or_are_refused(tmp_path):
    model, calls = nn.Linear(3, 2), []
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    sf.save(tmp_path / "one", state)
    optimizer.register_load_state_dict_post_hook(lambda of: calls.append(of))
    sf.load(tmp_path / "one", state)
    assert calls == [optimizer]

    def converts(of, state_dict):
        return state_dict

    handle = optimizer.register_load_state_dict_pre_hook(converts)
    with pytest.raises(sf.Invalid, match=r"optimizer: its hook '.*converts' .*needs the whole state dict.*post-hook"):
        sf.load(tmp_path / "one", state)
    handle.remove()
    sf.load(tmp_path / "one", state)


# Versions of classes


class Scaled(nn.Module):
    """A layer in its first version, of which loads are counted."""

    def __init__(self, value=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 2), value))
        self.b = nn.Parameter(torch.full((2,), value))
        self.versions = []

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.versions.append(local_metadata.get("version"))
        for name in ("w", "b"):
            if self.versions[-1] < type(self)._version and f"{prefix}{name}" in state_dict:
                state_dict[f"{prefix}{name}"] = state_dict[f"{prefix}{name}"] * 100
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Rescaled(Scaled):
    """Its second version, in another unit."""

    _version = 2


class Hooked(nn.Module):
    """A layer in its third version with a hook in place of a method."""

    _version = 3

    def __init__(self, value=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), value))
        self.register_load_state_dict_pre_hook(self.before)

    @staticmethod
    def before(module, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 3:
            state_dict[f"{prefix}w"] = state_dict[f"{prefix}w"] * 100


class Plain(nn.Module):
    """Its tensors, and none of its code."""

    def __init__(self, value=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 2), value))
        self.b = nn.Parameter(torch.full((2,), value))


def made(kind, value=0.0):
    return nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": kind(value), "n": nn.BatchNorm1d(2)}), Hooked(value))


def values_of(model):
    """All that the layers in it hold, which is one number."""
    parts = [part for part in model.modules() if isinstance(part, (Scaled, Hooked, Plain))]
    assert parts
    return {number for part in parts for one in part.parameters() for number in one.detach().flatten().tolist()}


def leaves_of(url):
    with sf.mapped(url) as checkpoint:
        return {name: checkpoint.value(name) for name in checkpoint.value_names() if name.endswith("_version")}


def test_a_module_of_a_version_loads_what_it_saved_without_migrating_it(tmp_path):
    model, loaded = made(Rescaled, 1.0), made(Rescaled)
    sf.save(tmp_path / "one", {"model": model})
    assert leaves_of(tmp_path / "one") == {"model/1.a._version": 2, "model/2._version": 3}, "and none of BatchNorm"
    plan = sf.load(tmp_path / "one", {"model": loaded})
    assert values_of(loaded) == {1.0} and loaded[1]["a"].versions == [2]
    assert plan.missing == plan.unexpected == plan.dropped == []
    with sf.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": model})
    restored = made(Rescaled)
    with sf.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore({"model": restored}) == 1
    assert values_of(restored) == {1.0}
    root = Rescaled()
    sf.save(tmp_path / "root", {"model": Rescaled(1.0)})
    sf.load(tmp_path / "root", {"model": root})
    assert values_of(root) == {1.0} and leaves_of(tmp_path / "root") == {"model/_version": 2}


def test_an_older_checkpoint_is_migrated_once(tmp_path):
    sf.save(tmp_path / "one", {"model": nn.ModuleList([Scaled(1.0)])})
    assert leaves_of(tmp_path / "one") == {}
    model = nn.ModuleList([Rescaled()])
    sf.load(tmp_path / "one", {"model": model})
    assert values_of(model) == {100.0} and model[0].versions == [1]
    sf.save(tmp_path / "two", {"model": model})
    again = nn.ModuleList([Rescaled()])
    sf.load(tmp_path / "two", {"model": again})
    assert values_of(again) == {100.0}


def test_a_newer_checkpoint_goes_into_an_older_class_and_into_one_without_hooks(tmp_path):
    sf.save(tmp_path / "one", {"model": nn.ModuleList([Rescaled(1.0)])})
    for kind in (Scaled, Plain):
        model = nn.ModuleList([kind()])
        plan = sf.load(tmp_path / "one", {"model": model})
        assert values_of(model) == {1.0} and plan.unexpected == []
        assert getattr(model[0], "versions", [2]) == [2], "as PyTorch: load hooks get the version of the class"


def test_what_a_load_leaves_out_is_not_migrated(tmp_path):
    sf.save(tmp_path / "old", {"model": nn.ModuleList([Scaled(1.0), Scaled(1.0)])})
    model = nn.ModuleList([Rescaled(5.0), Rescaled(5.0)])
    sf.load(tmp_path / "old", {"model": model}, only="model/0.w")
    assert set(model[0].w.flatten().tolist()) == {100.0} and model[0].b.tolist() == [5.0, 5.0]
    assert values_of(model[1]) == {5.0} and model[1].versions == [2]
    sf.save(tmp_path / "new", {"model": nn.ModuleList([Rescaled(1.0), Rescaled(1.0)])})
    sf.load(tmp_path / "new", {"model": model}, only="model/0.b")
    assert set(model[0].w.flatten().tolist()) == {100.0} and model[0].b.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("is_newer_first", [True, False])
def test_a_version_goes_where_rename_puts_the_tensors(tmp_path, is_newer_first):
    kinds = [Rescaled, Scaled] if is_newer_first else [Scaled, Rescaled]
    sf.save(tmp_path / "one", {"model": nn.ModuleDict({"a": kinds[0](1.0), "b": kinds[1](2.0)})})
    names = {f"model/{one}.{name}": f"net/{other}.{name}" for one, other in ("ab", "ba") for name in "wb"}
    for rename in (names, lambda name: names.get(name, name.replace("model/", "net/"))):
        net = nn.ModuleDict({"a": Rescaled(), "b": Rescaled()})
        sf.load(tmp_path / "one", {"net": net}, rename=rename, strict=False)
        expected = (200.0, 1.0) if is_newer_first else (2.0, 100.0)
        assert (values_of(net["a"]), values_of(net["b"])) == ({expected[0]}, {expected[1]})


class Forwarding(nn.Module):
    """Has the state dict of what it wraps, as Fabric's wrapper."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def state_dict(self, *args, **kwargs):
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.inner.load_state_dict(*args, **kwargs)


WRAPPERS = [
    lambda kind, value=0.0: made(kind, value),
    lambda kind, value=0.0: torch.compile(made(kind, value)),
    lambda kind, value=0.0: nn.DataParallel(made(kind, value)),
    lambda kind, value=0.0: Forwarding(made(kind, value)),
    lambda kind, value=0.0: nn.Sequential(*map(checkpoint_wrapper, made(kind, value))),
]


def test_wrappers_do_not_count(tmp_path):
    for number, wrapped in enumerate(WRAPPERS):
        sf.save(tmp_path / f"{number}", {"model": wrapped(Rescaled, 1.0)})
        sf.save(tmp_path / f"old-{number}", {"model": wrapped(Scaled, 1.0)})
        assert leaves_of(tmp_path / f"{number}") == leaves_of(tmp_path / "0")
    for into in WRAPPERS:
        for number in range(len(WRAPPERS)):
            model = into(Rescaled)
            sf.load(tmp_path / f"{number}", {"model": model})
            assert values_of(model) == {1.0}
            sf.load(tmp_path / f"old-{number}", {"model": model})
            assert values_of(model) == {1.0, 100.0}, "the hooked layer's is of its version"


class Named(Rescaled):
    """Has an entry of that name itself, and a buffer of it in a part."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}_version"] = "mine"

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        assert state_dict.pop(f"{prefix}_version", None) == "mine"
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_an_entry_of_that_name_stays_itself(tmp_path):
    sf.save(tmp_path / "one", {"model": nn.ModuleList([Named(1.0)])})
    model = nn.ModuleList([Named()])
    sf.load(tmp_path / "one", {"model": model})
    assert values_of(model) == {1.0}
    with pytest.raises(sf.Invalid, match=r"0\._version is 'mine' in the checkpoint: expected the _version of a class"):
        sf.load(tmp_path / "one", {"model": nn.ModuleList([Rescaled()])})


def test_stages_have_the_versions_of_the_whole(tmp_path):
    whole = nn.ModuleDict({"a": Rescaled(1.0), "b": nn.Linear(2, 2), "c": Hooked(1.0)})
    stages = [nn.ModuleDict({"a": Rescaled(), "b": nn.Linear(2, 2)}), nn.ModuleDict({"c": Hooked()})]
    sf.save(tmp_path / "one", {"model": whole})
    sf.load(tmp_path / "one", {"model": stages})
    assert values_of(stages[0]) == values_of(stages[1]) == {1.0}
    sf.save(tmp_path / "two", {"model": stages})
    assert leaves_of(tmp_path / "two") == {"model/a._version": 2, "model/c._version": 3}
    other = nn.Module()
    other.x = nn.Parameter(torch.zeros(1))
    other._version = 4
    other.register_load_state_dict_pre_hook(before_load)
    with pytest.raises(sf.Invalid, match=r"parts of the same name '', of classes whose _version differs \(2, 4\)"):
        sf.save(tmp_path / "three", {"model": [Rescaled(), other]})


def sharded(layout, kind, value=0.0):
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(made(kind, value))
    if layout == "fsdp1":  # FSDP1 refuses parts that load by themselves below it
        model = made(kind, value)
        model[0] = FSDP(model[0], device_id=torch.device("cpu"))
        return model
    model = made(kind, value)
    fully_shard(model[1]["a"])
    return fully_shard(model)


def here(model):
    with torch.no_grad():
        locals_ = [getattr(one, "_local_tensor", one) for name, one in model.named_parameters() if name[-1] == "w"]
        return {number for one in locals_ for number in one.flatten().tolist()}


def save_and_load_versions(rank, world, url):
    layouts = ("fsdp2", "ddp", "fsdp1")
    for layout in layouts:
        sf.save(f"{url}/{layout}", {"model": sharded(layout, Rescaled, 1.0)})
        sf.save(f"{url}/old-{layout}", {"model": sharded(layout, Scaled, 1.0)})
    for into in layouts:
        for saved in layouts:
            model = sharded(into, Rescaled)
            sf.load(f"{url}/{saved}", {"model": model})
            assert here(model) == {1.0}, (into, saved)
            sf.load(f"{url}/old-{saved}", {"model": model})
            assert here(model) == {1.0, 100.0}, (into, saved)


def test_sharded_modules_load_their_own_version(ranks, tmp_path):
    ranks(2)(save_and_load_versions, f"{tmp_path}")
    for layout in ("fsdp2", "ddp", "fsdp1"):
        model = made(Rescaled)
        sf.load(tmp_path / layout, {"model": model})
        assert values_of(model) == {1.0} and len(leaves_of(tmp_path / layout)) == 2
