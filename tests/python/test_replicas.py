"""What ranks hold under one name is one thing, or the save says so."""

import pytest
import shardfast as sf
import torch
from layouts import same_bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def stage(rank):
    """A pipeline stage whose layers begin at ``0``, as those of every other stage do; and its optimizer."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(300, 700), nn.Linear(700, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 300)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def refusals(state, directory):
    """What each way to save says."""

    def checkpointer():
        with sf.Checkpointer(f"{directory}/run", every=sf.steps(1), timeout_s=60) as ckpt:
            ckpt.step(1, state)

    ways = {
        "save": lambda: sf.save(f"{directory}/save", state, timeout_s=60),
        # What has failed once is not taken for proven.
        "again": lambda: sf.save(f"{directory}/again", state, timeout_s=60),
        "save_async": lambda: sf.save_async(f"{directory}/async", state, timeout_s=60).committed(),
        "checkpointer": checkpointer,
    }
    said = {}
    for name, way in ways.items():
        with pytest.raises(sf.Invalid) as caught:
            way()
        said[name] = str(caught.value)
    return said


def check_stages(rank, world, directory):
    model, optimizer = stage(rank)
    said = refusals({"model": model, "optimizer": optimizer}, directory)
    pending = sf.save_async(f"{directory}/lowest", {"model": model, "optimizer": optimizer}, prove=False)
    pending.committed()
    loaded, others = stage(7)
    sf.load(f"{directory}/lowest", {"model": loaded, "optimizer": others})
    first, first_optimizer = stage(0)
    whole = all(
        same_bits(one, other) for one, other in zip(loaded.parameters(), first.parameters(), strict=True)
    ) and all(
        same_bits(others.state[one][name], first_optimizer.state[other][name])
        for one, other in zip(loaded.parameters(), first.parameters(), strict=True)
        for name in ("exp_avg", "exp_avg_sq")
    )
    return said, pending.report["replicas"], whole


def test_pipeline_stages_that_both_call_a_layer_0_are_refused(ranks, tmp_path):
    """By every way to save, each time, naming the leaf and the ranks; with ``prove=False`` all of it is rank 0's."""
    for said, report, whole in ranks(2)(check_stages, str(tmp_path)):
        for name, text in said.items():
            assert "model/0.weight: its replicas of [0:700, 0:300] differ" in text, name
            assert "optimizer/state.0.weight.exp_avg: its replicas" in text, name
            assert "on rank 0" in text and "on rank 1" in text, name
        assert report == "not compared: of each region the lowest rank's copy"
        assert whole


def check_statistics(rank, world, directory):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 40_000), nn.BatchNorm1d(40_000)))
    model.module[1].running_mean.fill_(rank + 1)
    reports = []
    for number in range(2):
        pending = sf.save_async(f"{directory}/default{number}", {"model": model})
        pending.committed()
        reports.append(pending.report["replicas"])
    with pytest.raises(sf.Invalid, match=r"model/1\.running_mean: its replicas") as caught:
        sf.save(f"{directory}/all", {"model": model}, prove=True)
    excepted = "model/*.running_*"
    for number in range(2):
        sf.save(f"{directory}/excepted{number}", {"model": model}, prove=True, prove_except=excepted)
    with sf.Checkpointer(f"{directory}/run", prove=True, prove_except=[excepted]) as ckpt:
        ckpt.save(1, {"model": model})
    found = []
    for name in ("default0", "default1", "excepted0", "excepted1", "run/step-00000001"):
        loaded = nn.Sequential(nn.Linear(8, 40_000), nn.BatchNorm1d(40_000))
        sf.load(f"{directory}/{name}", {"model": loaded})
        found.append((float(loaded[1].running_mean.min()), float(loaded[1].running_mean.max())))
    return reports, "1.running_var" in str(caught.value), found


def test_statistics_that_drift_apart_can_be_excepted(ranks, tmp_path):
    """They are not compared unless all is, and come from one rank, however large they are."""
    for reports, names_others, found in ranks(3)(check_statistics, str(tmp_path)):
        assert reports == ["compared", "compared by an earlier save"]
        assert not names_others
        assert found == [(1.0, 1.0)] * 5


class Rows(torch.optim.SGD):
    """Keeps a moment for each row of this rank's shard, as a plain tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                local = parameter.grad.to_local()
                rows = self.state[parameter].setdefault("rows", torch.zeros(local.shape[0]))
                rows.add_(local.flatten(1).abs().sum(1))
        super().step()


def check_rows(rank, world, directory):
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False)
    fully_shard(model, mesh=mesh)
    optimizer = Rows(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    model(torch.zeros(2, 16)).sum().backward()
    optimizer.step()
    outcomes = []
    for number, prove in enumerate([None, False, None, False]):
        if number == 2:
            (model(torch.randn(2, 16)) * torch.arange(8.0)).sum().backward()
            optimizer.step()
        try:
            sf.save(f"{directory}/{number}", state, prove=prove)
            outcomes.append(None)
        except sf.Invalid as error:
            outcomes.append(str(error))
    return outcomes


def test_moments_of_another_shape_than_their_parameter_are_compared_by_every_save(ranks, tmp_path):
    """They were equal while they were zero: that proves nothing."""
    for outcomes in ranks(2)(check_rows, str(tmp_path)):
        assert outcomes[:2] == [None, None]
        for text in outcomes[2:]:
            assert "optimizer/state.weight.rows: its replicas" in text


def check_layouts(rank, world, directory):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    reports = []
    for number in range(4):
        pending = sf.save_async(f"{directory}/{number}", state)
        pending.committed()
        reports.append(pending.report["replicas"])
        if number == 1:
            model(torch.randn(2, 16)).sum().backward()
            optimizer.step()
    return reports


def test_each_layout_is_compared_once(ranks, tmp_path):
    """The optimizer's state that appears with its first step is another layout."""
    for reports in ranks(2)(check_layouts, str(tmp_path)):
        assert reports == ["compared", "compared by an earlier save"] * 2


def test_what_prove_is_not_is_refused(tmp_path):
    with pytest.raises(sf.Invalid, match=r"prove='model': expected None, True or False"):
        sf.save(tmp_path / "one", {"w": {"w": torch.zeros(3)}}, prove="model")


def test_a_rank_alone_has_no_replicas(tmp_path):
    pending = sf.save_async(tmp_path / "one", {"model": {"w": torch.ones(4)}})
    pending.committed()
    assert pending.report["replicas"] == "none: one rank holds all"


def check_shapes(rank, world, directory):
    """An expert that every rank has under the same name, with a shape of its own."""
    with pytest.raises(sf.Invalid, match=r"model/expert\.weight: expected the same on all ranks"):
        sf.save(f"{directory}/no", {"model": {"expert.weight": torch.ones(3 + rank)}}, prove=True, timeout_s=30)
    sf.save(f"{directory}/own", {"model": {"expert.weight": sf.PerRank(torch.full((3,), float(rank)))}})
    loaded = {"expert.weight": sf.PerRank(None)}
    sf.load(f"{directory}/own", {"model": loaded})
    assert loaded["expert.weight"].value.tolist() == [float(rank)] * 3


def test_replicas_of_another_shape_are_refused_and_there_is_a_word_for_a_ranks_own(ranks, tmp_path):
    ranks(2)(check_shapes, str(tmp_path))
