"""DeepSpeed's engines on a device, with and without offload to pinned memory, saved while the training goes on."""

import importlib.util

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not there")


def built(seed, stage, is_offloaded):
    """An engine in bf16."""
    import deepspeed

    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 130), nn.GELU(), nn.Linear(130, 33), nn.GELU(), nn.Linear(33, 64))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if is_offloaded:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def step(engine, number):
    generator = torch.Generator("cuda").manual_seed(number)
    x = torch.randn(8, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
    engine.backward((engine(x) - x).float().square().mean())
    engine.step()


def tensors(engine):
    """Copies of the parameters, of their copies in fp32 and of their moments, whole, as DeepSpeed says them."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found.append(parameter.detach().clone())
        found.append(safe_get_full_fp32_param(parameter).clone())
        found += [safe_get_full_optimizer_state(parameter, moment).clone() for moment in ("exp_avg", "exp_avg_sq")]
    return found


@pytest.fixture
def group(tmp_path, device):
    """One rank, whose process group is on the device."""
    store = dist.FileStore(f"{tmp_path}/rendezvous", 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_offloaded", [False, True], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_save_while_deepspeed_trains_comes_back_bit_for_bit(tmp_path, stage, is_offloaded):
    trained, fresh = built(0, stage, is_offloaded), built(1, stage, is_offloaded)
    for number in range(2):
        step(trained, number)
    before = tensors(trained)
    pending = sf.save_async(tmp_path / "saved", {"model": trained, "optimizer": trained.optimizer})
    for number in range(2, 4):
        step(trained, number)
    pending.committed()
    assert not all(map(torch.equal, tensors(trained), before))
    sf.load(tmp_path / "saved", {"model": fresh, "optimizer": fresh.optimizer})
    found = tensors(fresh)
    assert len(found) == len(before) == 4 * 6
    assert all(map(torch.equal, found, before))
    for number in range(2, 4):
        step(fresh, number)
    assert all(map(torch.equal, tensors(fresh), tensors(trained)))
