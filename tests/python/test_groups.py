"""Parameter groups and classes of optimizers that differ by rank; state that a class makes by a parameter's shape."""

import shutil
from pathlib import Path

import pytest
import shardfast as sf
import torch
from older import AVERAGED
from test_accounts import held, net, step
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

# Groups


def groups_of(optimizer):
    (group,) = optimizer.param_groups
    return group["lr"], group.get("note")


def check_groups(rank, world, url):
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = AdamW(model.parameters())
    step(model, optimizer)
    optimizer.param_groups[0].update(lr=(rank + 1) / 4, note=f"rank {rank}")
    sf.save(f"{url}/ddp", {"model": model, **held(optimizer)})
    for options in ({}, {"strict": False}, {"per_rank": "rank0"}, {"per_rank": "index"}):
        other = AdamW(model.parameters())
        sf.load(f"{url}/ddp", {"model": model, **held(other)}, **options)
        assert groups_of(other) == ((rank + 1) / 4, f"rank {rank}")
    # Each rank has a module of its own, and one that both have.
    parts = nn.ModuleDict({"both": net(), f"of {rank}": net()})
    optimizer = SGD(parts["both"].parameters(), lr=3 + rank)
    optimizer.add_param_group({"params": parts[f"of {rank}"].parameters(), "lr": 5 + rank})
    sf.save(f"{url}/parts", {"model": parts, **held(optimizer)})
    into = nn.ModuleDict({"both": net(), "of 0": net(), "of 1": net()})
    other = SGD([{"params": part.parameters()} for part in into.values()])
    sf.load(f"{url}/parts", {"model": into, **held(other)})
    assert [group["lr"] for group in other.param_groups] == [3 + rank, 5, 6]


def check_index(rank, world, url):
    model = net()
    optimizer = AdamW(model.parameters())
    sf.load(f"{url}/ddp", {"model": model, **held(optimizer)}, per_rank="index")
    assert groups_of(optimizer) == ((rank % 2 + 1) / 4, f"rank {rank % 2}")


def test_what_differs_by_rank_in_groups_comes_back_to_its_rank(ranks, tmp_path):
    ranks(2)(check_groups, f"{tmp_path}")
    ranks(3)(check_index, f"{tmp_path}")
    model = net()
    optimizer = AdamW(model.parameters())
    with pytest.raises(
        sf.Invalid, match=r"two groups with different hyper-parameters: lr = 0\.25 and 0\.5, .*per_rank="
    ):
        sf.load(tmp_path / "ddp", {"model": model, **held(optimizer)})
    for choice in ("rank0", "index"):
        sf.load(tmp_path / "ddp", {"model": model, **held(optimizer)}, per_rank=choice)
        assert groups_of(optimizer) == (0.25, "rank 0")
        into = nn.ModuleDict({"both": net(), "of 0": net(), "of 1": net()})
        other = SGD([{"params": part.parameters()} for part in into.values()])
        sf.load(tmp_path / "parts", {"model": into, **held(other)}, per_rank=choice)
        assert [group["lr"] for group in other.param_groups] == [3, 5, 6]


# Classes


def refuses(url, state):
    said = r'param_groups: the state of "bias" belongs to \S+SGD on rank 0 and to \S+AdamW on rank [12], .* one class'
    with pytest.raises(sf.Invalid, match=said):
        sf.save(url, state)
    assert not Path(url, "COMMIT").exists()


def check_classes(rank, world, url):
    for wrapped in (lambda model: model, nn.parallel.DistributedDataParallel):
        for decay in (0, 0.9):  # SGD without momentum has no state
            model = wrapped(net())
            optimizer = AdamW(model.parameters()) if rank else SGD(model.parameters(), momentum=decay)
            sf.save(f"{url}/new", {"model": model, **held(optimizer)})
            other = wrapped(net(1))
            into = AdamW(other.parameters()) if rank else SGD(other.parameters())
            sf.load(f"{url}/new", {"model": other, **held(into)})
            step(model, optimizer)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(1)
            refuses(f"{url}/stepped", {"model": model, **held(optimizer)})
            if rank == 0:
                shutil.rmtree(f"{url}/new")


def check_alike(rank, world, url):
    # Adam and AdamW take each other's state, and a rank's own entry in a group makes no other class.
    model = net()
    optimizer = Adam(model.parameters()) if rank == 1 else AdamW(model.parameters(), weight_decay=0)
    if rank == 2:
        optimizer.param_groups[0]["note"] = "rank 2"
    step(model, optimizer)
    sf.save(f"{url}/alike", {"model": model, **held(optimizer)})


def test_state_of_two_classes_on_two_ranks_is_refused_at_the_save(ranks, tmp_path):
    ranks(3)(check_classes, f"{tmp_path}")
    ranks(3)(check_alike, f"{tmp_path}")


# Shapes


class Factored(Optimizer):
    """Keeps one number for each row of a matrix, and one for each element of what is no matrix."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                is_matrix = parameter.ndim == 2
                name, now = ("rows", parameter.grad.abs().sum(1)) if is_matrix else ("all", parameter.grad.abs())
                self.state[parameter][name] = self.state[parameter].get(name, torch.zeros_like(now)) + now


class Elementwise(Optimizer):
    """Keeps one number for each element."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                now = self.state[parameter].get("all", torch.zeros_like(parameter))
                self.state[parameter]["all"] = now + parameter.grad.abs()


def laid_out(layout, seed=0):
    if layout == "fsdp2":
        return fully_shard(net(seed), **AVERAGED)
    if layout == "plain":
        return net(seed)
    return FSDP(net(seed), use_orig_params=layout == "fsdp1 orig", device_id=torch.device("cpu"))


class Replicating(Optimizer):
    """Keeps one number for each row, all of them on each rank."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            whole = [Replicate()] * parameter.device_mesh.ndim
            self.state[parameter]["rows"] = (
                parameter.grad.abs().reshape(len(parameter), -1).sum(1).redistribute(placements=whole)
            )


def check_replicated(rank, world, url):
    model = laid_out("fsdp2")
    optimizer = Replicating(model.parameters())
    step(model, optimizer)
    sf.save(url, {"model": model, **held(optimizer)})
    into = laid_out("fsdp2", 1)
    other = Replicating(into.parameters())
    sf.load(url, {"model": into, **held(other)})
    for one, two in zip(model.parameters(), into.parameters(), strict=True):
        rows, again = optimizer.state[one]["rows"], other.state[two]["rows"]
        assert again.placements == (Replicate(),) and torch.equal(rows.to_local(), again.to_local())


def test_state_that_was_whole_on_each_rank_beside_a_sharded_parameter_is_made_so(ranks, tmp_path):
    ranks(2)(check_replicated, f"{tmp_path}/one")


FLAT = ("fsdp1 orig", "fsdp1 flat")


def check_shapes(rank, world, url):
    for kind, layouts in {
        Adafactor: ("plain", *FLAT),  # PyTorch's takes no DTensors
        Factored: ("plain", "fsdp2", *FLAT),
        Elementwise: ("plain", "fsdp2", *FLAT),
        AdamW: ("plain", "fsdp2", *FLAT),
    }.items():
        for layout in layouts:
            model = laid_out(layout)
            optimizer = kind(model.parameters())
            step(model, optimizer)
            sf.save(f"{url}/{kind.__name__}/{layout}", {"model": model, **held(optimizer)})
        for saved in layouts:
            for layout in layouts:
                into = laid_out(layout, 1)
                other = kind(into.parameters())
                before = [parameter.detach().clone() for parameter in into.parameters()]
                state = {"model": into, **held(other)}
                if kind is AdamW or (saved in FLAT) == (layout in FLAT):
                    sf.load(f"{url}/{kind.__name__}/{saved}", state)
                    step(into, other, 1)
                    continue
                with pytest.raises(sf.Invalid, match=rf"{kind.__name__} made it for a .* step the optimizer once"):
                    sf.load(f"{url}/{kind.__name__}/{saved}", state)
                assert all(map(torch.equal, into.parameters(), before)) and not other.state
                step(into, other, 1)
                if kind is Elementwise:
                    sf.load(f"{url}/{kind.__name__}/{saved}", state)
                    step(into, other, 1)
                    continue
                with pytest.raises(sf.Invalid, match=rf"{kind.__name__} made it for a .* for which it may make other"):
                    sf.load(f"{url}/{kind.__name__}/{saved}", state)


def test_state_that_a_class_makes_by_shape_is_refused_where_it_would_make_another(ranks, tmp_path):
    ranks(2)(check_shapes, f"{tmp_path}")


class Setting(SGD):
    """Puts a rate of its own into its groups whenever it loads."""

    def load_state_dict(self, said):
        super().load_state_dict(said)
        for group in self.param_groups:
            group["lr"] = 7.0


def test_groups_are_what_was_loaded_whatever_an_own_load_puts_there(tmp_path):
    model = net()
    optimizer, other = Setting(model.parameters(), lr=0.5), Setting(model.parameters(), lr=0.1)
    sf.save(tmp_path / "one", {"model": model, **held(optimizer)})
    sf.load(tmp_path / "one", {"model": model, **held(other)})
    assert other.param_groups[0]["lr"] == 0.5
