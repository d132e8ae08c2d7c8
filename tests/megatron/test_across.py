"""Megatron-Core in bf16 and models of plain PyTorch in fp32 with the same names: each loads what the other saved."""

import re

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from jobs import Kind, Layout, begin, build, step, truth
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
KIND = Kind(vocabulary=96, divisible_by=8, hidden=24)


def of_name(whole, prefix, name):
    """Of all tensors of a Megatron job the one of a name, which may be a row of one of all layers."""
    if prefix + name in whole:
        return whole[prefix + name]
    layer = re.search(r"layers\.(\d+)\.", name)
    return whole[prefix + name.replace(layer[0], "layers.")][int(layer[1])]


class Part(nn.Module):
    """Parameters, and parts that have more of them."""

    def forward(self, seed):
        """A number with a random gradient for each parameter."""
        torch.manual_seed(seed)
        own = sum((one.float() * torch.randn(one.shape)).sum() for one in self._parameters.values())
        return sum((part(seed + 1 + number) for number, part in enumerate(self.children())), own)


def plain(url, seed, way):
    """A model with the parameters that a checkpoint has, laid out in a way, and AdamW."""
    torch.manual_seed(seed)
    model = Part()
    with sf.mapped(url) as checkpoint:
        shapes = {name.removeprefix("model/"): checkpoint[name].shape for name in checkpoint if name[:6] == "model/"}
    for name, shape in shapes.items():
        at, *path = model, *name.split(".")[:-1]
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, Part())
            at = getattr(at, part)
        at.register_parameter(name.rpartition(".")[2], nn.Parameter(torch.randn(shape)))
    if way == "FSDP2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    # As Megatron's: what has one axis does not decay.
    decaying = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return model, torch.optim.AdamW([{"params": decaying}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


def plain_step(model, optimizer, seed):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape)
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        else:
            parameter.grad = whole
    optimizer.step()


def whole_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def both_ways(rank, world, place, layout, way):
    """What is wrong after a load in each direction, on rank 0, and how many parameters there are."""
    begin(layout)
    chunks, optimizer = build(layout, KIND)
    for number in range(2):
        step(chunks, optimizer, number)
    sf.save(f"{place}/megatron", {"model": chunks, "optimizer": optimizer})
    before = truth(chunks, optimizer)
    model, adam = plain(f"{place}/megatron", 3, way)
    sf.load(f"{place}/megatron", {"model": model, "optimizer": adam}, strict=False)
    wrong = {"from": [], "into": []}
    for name, parameter in model.named_parameters():
        now = {"param": parameter, **{moment: adam.state[parameter][moment] for moment in MOMENTS}}
        for what, tensor in now.items():
            if not torch.equal(whole_of(tensor).detach(), of_name(before, f"optimizer.state.{what}.", name)):
                wrong["from"].append(f"{what} of {name}")
    plain_step(model, adam, 7)
    sf.save(f"{place}/plain", {"model": model, "optimizer": adam})
    chunks, optimizer = build(layout, KIND, seed=5)
    sf.load(f"{place}/plain", {"model": chunks, "optimizer": optimizer}, strict=False)
    after = truth(chunks, optimizer)
    for name, parameter in model.named_parameters():
        exact = whole_of(parameter).detach()
        expected = {"param": exact, **{moment: whole_of(adam.state[parameter][moment]) for moment in MOMENTS}}
        for what, tensor in expected.items():
            if not torch.equal(tensor, of_name(after, f"optimizer.state.{what}.", name)):
                wrong["into"].append(f"{what} of {name}")
        if not torch.equal(exact.bfloat16(), of_name(after, "", name)):
            wrong["into"].append(name)
    step(chunks, optimizer, 3)
    return wrong if rank == 0 else None, len(list(model.parameters()))


@pytest.mark.campaign
@pytest.mark.parametrize("way", ["plain", "FSDP2"])
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(), Layout(tp=2, distributed=False)], ids=str)
def test_megatron_and_plain_models_load_each_other(ranks, tmp_path, layout, way):
    wrong, parameters = ranks(4)(both_ways, str(tmp_path), layout, way)[0]
    assert parameters == 36
    assert wrong == {"from": [], "into": []}
