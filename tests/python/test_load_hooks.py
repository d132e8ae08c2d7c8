"""What PyTorch notices of a load: version counters rise, hooks run, modules that load by themselves do."""

import pytest
import shardfast as sf
import torch
from torch import nn


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
