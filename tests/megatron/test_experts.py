"""Experts are proven: those that ranks take for copies of one, and that are not, fail the first save by name."""

import shardfast as sf
import torch
from jobs import Kind, Layout, begin, build, step
from megatron.core.transformer.moe.experts import SequentialMLP
from test_refused import error_of

MATRIX = "decoder.layers.0.mlp.experts.experts.linear_fc2.weight"


class Alone:
    """An expert-parallel group as seen by experts that know of no other rank."""

    def size(self):
        return 1

    def rank(self):
        return 0


def save_mistaken(rank, world, place):
    begin(Layout(ep=2))
    chunks, optimizer = build(Layout(ep=2), Kind(layers=1, experts=4))
    step(chunks, optimizer, 0)
    found = {}
    expert = next(one for name, one in chunks[0].named_parameters() if "local_experts.1.linear_fc2" in name)
    before = expert.detach().clone()
    with torch.no_grad():
        if rank == 3:
            expert[3, 5] += 1
        found["copies"] = error_of(sf.save, f"{place}/copies", {"model": chunks})
        expert.copy_(before)
    for module in chunks[0].modules():
        if isinstance(module, SequentialMLP):
            module.ep_group = Alone()
    found["experts"] = error_of(sf.save, f"{place}/experts", {"model": chunks, "optimizer": optimizer})
    for parameter in chunks[0].parameters():
        parameter.allreduce = True
    found["replicas"] = error_of(sf.save, f"{place}/replicas", {"model": chunks})
    return found


def test_experts_that_are_no_copies_are_not_saved_as_one(ranks, tmp_path):
    for found in ranks(4)(save_mistaken, str(tmp_path)):
        assert f"model/{MATRIX}: its replicas of [3:4, 0:24, 0:28] differ" in found["copies"]
        assert "on rank 1" in found["copies"]
        assert "on rank 3" in found["copies"]
        # All say that they have the first two of two experts: as experts, which other groups of ranks have, too, then
        # as what each rank has.
        assert f"model/{MATRIX}: [0:1, 0:24, 0:28] by ranks 0-1 was written twice" in found["experts"]
        assert f"optimizer/state.{MATRIX}.master: [0:1, 0:24, 0:28]" in found["experts"]
        assert f"model/{MATRIX}: its replicas of [0:1, 0:24, 0:28] differ" in found["replicas"]
    assert not list(tmp_path.glob("*/COMMIT"))
