"""FSDP1 on a device: flat parameters there or offloaded, in mixed precision, on ranks that share the device."""

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

RANKS = 2


def made(kind: str, seed: int, *, use_orig_params: bool, is_offloaded: bool, is_mixed: bool):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Sequential(nn.Linear(40, 40), nn.GELU()), nn.Linear(40, 8))
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if is_mixed else None
    options = {
        "use_orig_params": use_orig_params,
        "device_id": torch.device(kind, 0) if kind != "cpu" else torch.device("cpu"),
        "cpu_offload": CPUOffload(offload_params=is_offloaded),
        "mixed_precision": half,
    }
    net[2] = FSDP(net[2], **options)
    model = FSDP(net, **options)
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


def check(rank: int, kind: str, folder: str, cases: list[dict[str, bool]]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        for number, case in enumerate(cases):
            model, optimizer = made(kind, 0, **case)
            losses(kind, model, optimizer, range(3))
            pending = sf.save_async(f"{folder}/{number}", {"model": model, "optimizer": optimizer})
            expected = losses(kind, model, optimizer, range(3, 8))
            pending.committed()
            other, other_optimizer = made(kind, 1, **case)
            losses(kind, other, other_optimizer, range(1))
            sf.load(f"{folder}/{number}", {"model": other, "optimizer": other_optimizer})
            assert losses(kind, other, other_optimizer, range(3, 8)) == expected, case
            # As it was saved, on one of the ranks alone, in whole tensors on the host.
            whole = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in full(other).items()}
            sf.load(f"{folder}/{number}", {"model": whole}, strict=False)
            sf.load(f"{folder}/{number}", {"model": other, "optimizer": other_optimizer})
            present = full(other)
            assert [name for name in whole if not torch.equal(whole[name], present[name].cpu())] == [], case
    finally:
        dist.destroy_process_group()


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_flat_parameters_on_a_device_come_back_bit_for_bit(tmp_path, device, is_offloaded):
    cases = [
        {"use_orig_params": use_orig_params, "is_offloaded": is_offloaded, "is_mixed": is_mixed}
        for use_orig_params in (True, False)
        for is_mixed in (True, False)
    ]
    torch.multiprocessing.spawn(check, args=(device.type, f"{tmp_path}", cases), nprocs=RANKS)
