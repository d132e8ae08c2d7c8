"""Muon and others of emerging-optimizers, which step whole matrices: divided among ranks by layers, or not divided.

The tests run where that package is, which needs Python 3.12.
"""

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from jobs import HAS_LAYERS, Kind, Layout, begin, build, step
from test_layouts import expect_bits
from test_refused import error_of

pytestmark = pytest.mark.skipif(
    not HAS_LAYERS, reason="emerging-optimizers or Megatron-Core 0.18, which steps by layers with it, is not there"
)

MUON, OF_EXPERTS = Kind(optimizer="muon"), Kind(optimizer="muon", experts=4)
LAYOUTS = [
    Layout(),
    Layout(tp=2, in_buffers=False),
    Layout(tp=2, pp=2),
    Layout(pp=2, vpp=2, in_buffers=False),
    Layout(tp=2, distributed=False),
    Layout(pp=2, vpp=2),
    Layout(cp=2),
    Layout(tp=4),
]
WITH_EXPERTS = [
    Layout(ep=2),
    Layout(ep=2, in_buffers=False),
    Layout(tp=2),
    Layout(ep=4),
    Layout(pp=2, ep=2),
    Layout(tp=2, pp=2),
    Layout(ep=2, distributed=False),
]


def test_what_layers_saved_another_layout_loads(ranks, tmp_path):
    names = expect_bits(ranks, tmp_path, OF_EXPERTS, WITH_EXPERTS[:1], [Layout(tp=2, pp=2, in_buffers=False)])
    for layer in range(OF_EXPERTS.layers):
        name = f"optimizer/state.decoder.layers.{layer}"
        assert f"{name}.mlp.experts.experts.linear_fc1.weight.momentum_buffer" in names
        assert f"{name}.self_attention.linear_qkv.weight.master" in names
        assert f"{name}.mlp.linear_fc1.layer_norm_weight.exp_avg_sq" in names


# Of Adam's state beside Lion, Megatron's own `fully_reshardable` leaves out the second moments: none in buffers here.
NOT_IN_BUFFERS = [Layout(in_buffers=False), Layout(tp=2, distributed=False), Layout(tp=2, pp=2, in_buffers=False)]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    [
        *((MUON, [layout], LAYOUTS) for layout in LAYOUTS),
        *((OF_EXPERTS, [layout], WITH_EXPERTS) for layout in WITH_EXPERTS),
        (Kind(optimizer="muon", tied=True), LAYOUTS[2:4], LAYOUTS),
        (Kind(optimizer="lion"), NOT_IN_BUFFERS, NOT_IN_BUFFERS),
        (Kind(optimizer="laprop"), NOT_IN_BUFFERS, NOT_IN_BUFFERS),
    ],
    ids=str,
)
def test_every_layout_of_layers_loads_every_other(ranks, tmp_path, kind, saved, loaded):
    expect_bits(ranks, tmp_path, kind, saved, loaded)


def others(chunk):
    """The parameters that are not those that the ranks step, rounded."""
    named = dict(chunk.named_parameters())
    mine = {name: one.main_param.detach() for name, one in named.items() if hasattr(one, "main_param")}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    stepped = {name: copy for of in everyone for name, copy in of.items()}
    assert stepped.keys() == named.keys()
    assert len(mine) < len(named)
    return sorted(name for name, one in named.items() if not torch.equal(one.detach(), stepped[name].to(one.dtype)))


def resume(rank, world, place):
    layout, kind = Layout(in_buffers=False), Kind(layers=2, optimizer="muon")
    begin(layout)
    chunks, optimizer = build(layout, kind)
    step(chunks, optimizer, 0)
    sf.save(f"{place}/saved", {"model": chunks, "optimizer": optimizer})
    chunks, optimizer = build(layout, kind, seed=5)
    fresh = {name: one.detach().clone() for name, one in chunks[0].named_parameters()}
    state = {"model": chunks, "optimizer": optimizer}
    sf.load(f"{place}/saved", state)
    found = {"loaded": others(chunks[0])}
    with torch.no_grad():
        for name, one in chunks[0].named_parameters():
            if not hasattr(one, "main_param"):  # another rank steps it: after a load no gather brings it here
                one.copy_(fresh[name])
    found["not gathered"] = others(chunks[0])
    found["save"] = error_of(sf.save, f"{place}/again", state, prove=True)  # as the first save of each process does
    chunks, optimizer = build(layout, kind, seed=6)
    found["load"] = error_of(sf.load, f"{place}/saved", {"model": chunks, "optimizer": optimizer}, only="optimizer")
    return found


def test_no_rank_goes_on_with_another_model(ranks, tmp_path):
    """As in NVIDIA/Megatron-LM#6920, where each rank had after a load only the parameters that it steps itself."""
    for found in ranks(4)(resume, str(tmp_path)):
        assert found["loaded"] == []
        assert found["not gathered"]
        assert "model/decoder.final_layernorm.bias: its replicas of [0:24] differ" in found["save"]
        assert ".master and the model's" in found["load"]


def save_changed(rank, world, place):
    layout = Layout(in_buffers=False)
    begin(layout)
    chunks, optimizer = build(layout, Kind(layers=1, optimizer="muon"))
    step(chunks, optimizer, 0)
    muon = optimizer.chained_optimizers[0].optimizer
    if rank == 1:
        for group in muon.param_groups:
            group["params"] = group["params"][1:]
    changed = error_of(sf.save, f"{place}/changed", {"model": chunks, "optimizer": optimizer})
    begin(layout)
    chunks, optimizer = build(layout, Kind(layers=1, optimizer="soap"))
    step(chunks, optimizer, 0)
    return changed, error_of(sf.save, f"{place}/soap", {"model": chunks, "optimizer": optimizer})


def test_what_is_not_understood_of_layers_is_refused(ranks, tmp_path):
    for changed, soap in ranks(2)(save_changed, str(tmp_path)):
        assert "rank 1: optimizer: a LayerWiseDistributedOptimizer steps 0 parameters that its lists do not" in changed
        assert "leaves out 1 that they do" in changed
        assert "state.decoder.layers.0.self_attention.linear_proj.weight.L has shape (24, 24), and this rank" in soap
