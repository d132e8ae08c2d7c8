"""FSDP on a device: parameters there or offloaded, in mixed precision, on ranks that share the device."""

from collections.abc import Callable

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

RANKS = 2
Made = Callable[[str, nn.Sequential, bool, bool], nn.Module]


def fsdp1(use_orig_params: bool) -> Made:
    def wrap(kind: str, net: nn.Sequential, is_offloaded: bool, is_mixed: bool) -> nn.Module:
        half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if is_mixed else None
        options = {
            "use_orig_params": use_orig_params,
            "device_id": torch.device(kind, 0) if kind != "cpu" else torch.device("cpu"),
            "cpu_offload": CPUOffload(offload_params=is_offloaded),
            "mixed_precision": half,
        }
        net[2] = FSDP(net[2], **options)
        return FSDP(net, **options)

    return wrap


def fsdp2(kind: str, net: nn.Sequential, is_offloaded: bool, is_mixed: bool) -> nn.Module:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {
        "mesh": init_device_mesh(kind, (RANKS,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=kind != "cpu") if is_offloaded else OffloadPolicy(),
        "mp_policy": half if is_mixed else MixedPrecisionPolicy(),
    }
    fully_shard(net[2], **options)
    return fully_shard(net, **options)


WAYS = {
    "FSDP1, original parameters": fsdp1(use_orig_params=True),
    "FSDP1, flat parameters": fsdp1(use_orig_params=False),
    "FSDP2": fsdp2,
}


def made(kind: str, seed: int, way: str, is_offloaded: bool, is_mixed: bool):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Sequential(nn.Linear(40, 40), nn.GELU()), nn.Linear(40, 8))
    model = WAYS[way](kind, net, is_offloaded, is_mixed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def losses(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(4, 24, generator=generator).to(kind)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # with offloaded parameters, FSDP1 keeps gradients that were let go of
        found.append(loss.item())
    return found


def check(rank: int, kind: str, folder: str, way: str, is_offloaded: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        for is_mixed in (False, True):
            place = f"{folder}/{is_mixed}"
            model, optimizer = made(kind, 0, way, is_offloaded, is_mixed)
            losses(kind, model, optimizer, range(3))
            pending = sf.save_async(place, {"model": model, "optimizer": optimizer})
            expected = losses(kind, model, optimizer, range(3, 8))
            pending.committed()
            other, other_optimizer = made(kind, 1, way, is_offloaded, is_mixed)
            losses(kind, other, other_optimizer, range(1))
            sf.load(place, {"model": other, "optimizer": other_optimizer})
            assert losses(kind, other, other_optimizer, range(3, 8)) == expected, f"is_mixed={is_mixed}"
            # As it was saved, in whole tensors on the host.
            whole = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in full(other, kind).items()}
            sf.load(place, {"model": whole}, strict=False)
            sf.load(place, {"model": other, "optimizer": other_optimizer})
            present = full(other, kind)
            assert whole
            assert [name for name in whole if not torch.equal(whole[name], present[name].cpu())] == [], place
    finally:
        dist.destroy_process_group()


def full(model: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    if not isinstance(model, FSDP):
        return {name: parameter.detach().cpu().full_tensor() for name, parameter in model.named_parameters()}
    with FSDP.summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }


@pytest.mark.parametrize("is_offloaded", [False, True], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("way", WAYS)
def test_shards_on_a_device_come_back_bit_for_bit(tmp_path, device, way, is_offloaded):
    torch.multiprocessing.spawn(check, args=(device.type, f"{tmp_path}", way, is_offloaded), nprocs=RANKS)
