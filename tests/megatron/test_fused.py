"""Optimizers that count steps in their groups, as TransformerEngine's and Apex's `FusedAdam` do, by a stand-in."""

import contextlib

import fused_adam
import shardfast as sf
from jobs import Kind, Layout, begin, build, difference, step, truth
from test_large import inner_of
from test_layouts import no_collectives
from test_refused import error_of

KIND = Kind(layers=1)


def steps_of(optimizer):
    """The counts of its groups, `None` where there is none; those without parameters here count nothing."""
    groups = [group for inner in inner_of(optimizer) for group in inner.param_groups if group["params"]]
    return {group.get("step") for group in groups}


@fused_adam.in_place()
def through(rank, world, place):
    found = {}
    for source, target in ((Layout(tp=2), Layout()), (Layout(), Layout(distributed=False))):
        url = f"{place}/{source}"
        begin(source)
        chunks, optimizer = build(source, KIND)
        sf.save(f"{url}, new", {"model": chunks, "optimizer": optimizer})
        for number in range(3):
            step(chunks, optimizer, number)
        with no_collectives():
            sf.save(url, {"model": chunks, "optimizer": optimizer})
        before = truth(chunks, optimizer)
        resumed = build(source, KIND, seed=5)
        sf.load(url, {"model": resumed[0], "optimizer": resumed[1]})
        for objects in ((chunks, optimizer), resumed):
            step(*objects, 3)
        on = difference(truth(chunks, optimizer), truth(*resumed))
        begin(target)
        chunks, optimizer = build(target, KIND, seed=5)
        sf.load(url, {"model": chunks, "optimizer": optimizer})
        found[str(source)] = len(before), on, difference(before, truth(chunks, optimizer)), steps_of(optimizer)
        step(chunks, optimizer, 3)
        sf.load(f"{url}, new", {"model": chunks, "optimizer": optimizer})
        states = sum(len(inner.state) for inner in inner_of(optimizer))
        found[str(source), "new"] = states, steps_of(optimizer)
    return found


def test_counts_of_groups_come_back_in_another_layout(ranks, tmp_path):
    for found in ranks(2)(through, str(tmp_path)):
        assert len(found) == 4
        for name, said in found.items():
            if isinstance(name, tuple):
                assert said == (0, {None}), name
            else:
                assert said[0] > 10
                assert said[1:] == ([], [], {3}), (name, said)


def across(rank, world, place):
    found, torchs = [], contextlib.nullcontext
    for saved, loaded in ((fused_adam.in_place, torchs), (torchs, fused_adam.in_place)):
        url = f"{place}/{saved.__name__}"
        begin(Layout())
        with saved():
            chunks, optimizer = build(Layout(), KIND)
        step(chunks, optimizer, 0)
        sf.save(url, {"model": chunks, "optimizer": optimizer})
        with loaded():
            chunks, optimizer = build(Layout(), KIND, seed=5)
        found.append(error_of(sf.load, url, {"model": chunks, "optimizer": optimizer}))
    return found


def test_a_count_of_groups_is_not_one_of_parameters(ranks, tmp_path):
    for fused, plain in ranks(2)(across, str(tmp_path)):
        assert "was saved by fused_adam.FusedAdam, and here torch.optim.adamw.AdamW owns it" in fused
        assert "was saved by torch.optim.adamw.AdamW, and here fused_adam.FusedAdam owns it" in plain
