"""Megatron's optimizers with copies in fp32, and models in fp32: each loads what the other saved, bit for bit."""

import dataclasses

import pytest
import shardfast as sf
import torch
from jobs import Kind, Layout, begin, build, step, truth

OWN = "optimizer.state.param."


def expected_of(before, dtype):
    """What a load makes of all tensors of the other precision, by name."""
    found = {}
    for name, tensor in before.items():
        if not name.startswith("optimizer."):
            exact = before.get(OWN + name, tensor)
            found[name] = exact.to(dtype)
            found[OWN + name] = exact
        elif not name.startswith(OWN):
            found[name] = tensor
    return found


def both_ways(rank, world, place, kind, half, full):
    """By direction what is wrong after a load, and what its plan says."""
    wrong, notes = {}, {}
    for source, target, dtypes in (
        (half, full, (torch.bfloat16, torch.float32)),
        (full, half, (torch.float32, torch.bfloat16)),
    ):
        begin(source)
        chunks, optimizer = build(source, dataclasses.replace(kind, dtype=dtypes[0]))
        for number in range(2):
            step(chunks, optimizer, number)
        url = f"{place}/{dtypes[0]}"
        sf.save(url, {"model": chunks, "optimizer": optimizer})
        expected = expected_of(truth(chunks, optimizer), dtypes[1])
        begin(target)
        chunks, optimizer = build(target, dataclasses.replace(kind, dtype=dtypes[1]), seed=5)
        plan = sf.load(url, {"model": chunks, "optimizer": optimizer})
        assert not plan.cast
        notes[str(dtypes[1])] = plan.masters
        now = truth(chunks, optimizer)
        wrong[str(dtypes[1])] = (
            sum(name in now for name in expected),
            [
                name
                for name, tensor in expected.items()
                # Optimizers list parameters in fp32 or leave them out; rows of padding may be more or fewer.
                if name in now
                and (now[name].dtype is not tensor.dtype or not torch.equal(*_of_both(now[name], tensor)))
            ],
        )
        step(chunks, optimizer, 2)
    return wrong, notes


def _of_both(one, other):
    rows = min(len(one), len(other)) if one.ndim else ()
    return (one[:rows], other[:rows]) if one.ndim else (one, other)


@pytest.mark.parametrize(
    ("half", "full"),
    [
        (Layout(tp=2), Layout(pp=2, distributed=False)),
        pytest.param(Layout(), Layout(tp=2), marks=pytest.mark.campaign),
        pytest.param(Layout(tp=2, pp=2, distributed=False), Layout(instances=2), marks=pytest.mark.campaign),
        pytest.param(Layout(pp=2, vpp=2), Layout(tp=4), marks=pytest.mark.campaign),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.campaign)], ids=["apart", "tied"])
def test_bf16_and_fp32_load_each_other(ranks, tmp_path, half, full, tied):
    kind = Kind(vocabulary=100, divisible_by=8, hidden=64 if tied else 24, tied=tied)
    told = ranks(4)(both_ways, str(tmp_path), kind, half, full)
    wrong, _ = told[0]
    assert set(wrong) == {"torch.float32", "torch.bfloat16"}
    assert all(tensors > 30 and not differs for tensors, differs in wrong.values()), wrong
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    for dtype, note in (
        (
            "torch.float32",
            f"model/{name}: BF16 in the checkpoint with a master; it becomes optimizer/state.{name}.master",
        ),
        (
            "torch.bfloat16",
            f"model/{name}: F32 in the checkpoint; the master here becomes its bits, the parameter their",
        ),
    ):
        assert any(said.startswith(note) for _, notes in told for said in notes[dtype])
