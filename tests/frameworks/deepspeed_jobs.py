"""Small models in engines of DeepSpeed on the CPU, and what their state is by DeepSpeed's own words."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
warnings.filterwarnings("ignore")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

with contextlib.suppress(ImportError):  # 0.16 has none
    import deepspeed.runtime.zero.muon.muon_optimizer  # which each rank would import by itself, for seconds

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
deepspeed.get_accelerator().is_fp16_supported = lambda: True  # slowly, on any processor
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
torch.set_num_threads(1)

BATCH, WIDTH = 4, 24


@dataclass(frozen=True)
class Job:
    """How a model is trained."""

    stage: int
    dtype: str = "bf16"
    offload: bool = False
    groups: int = 1
    frozen: bool = False
    tied: bool = False
    sub_group_size: int = 0
    """Of stage 3, in elements; 0 for one sub-group."""

    persists: bool = False
    """Whether stage 3 keeps small parameters whole."""

    optimizer: str = "adamw"
    hpz: int = 1
    """Of stage 3, on how many ranks second copies of parameters lie."""

    inner: int = 37
    """The width inside, an odd number."""

    @property
    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 100 if self.persists else 0
            if self.hpz > 1:
                zero["zero_hpz_partition_size"] = self.hpz
            if self.sub_group_size:
                zero["sub_group_size"] = self.sub_group_size
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
        }
        if self.dtype != "fp32":
            config[self.dtype] = {"enabled": True}
        if self.dtype == "fp16":
            config["fp16"] |= {"initial_scale_power": 8}
        return config


class Model(torch.nn.Module):
    """Layers with odd sizes, so that runs end in mid-row; a buffer, and a parameter of one element."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(WIDTH, 50, bias=False)
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(50, job.inner), torch.nn.GELU(), torch.nn.Linear(job.inner, 50)
        )
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))
        self.head = torch.nn.Linear(50, WIDTH)
        if job.tied:
            self.again = torch.nn.Linear(WIDTH, 50, bias=False)
            self.again.weight = self.embedding.weight
        if job.frozen:
            self.inner[0].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        if hasattr(self, "again"):
            hidden = hidden + self.again(x)
        return self.head(self.inner(hidden) * self.scale + hidden)


def build(job: Job, seed: int = 0, extra: Mapping[str, Any] = {}) -> Any:
    torch.manual_seed(seed)
    model = Model(job)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    cut = len(trained) // 2
    groups = [{"params": trained}]
    if job.groups == 2:
        groups = [{"params": trained[:cut], "weight_decay": 0.3}, {"params": trained[cut:], "weight_decay": 0.0}]
    kinds = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=1e-2),
        "sgd": lambda: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=kinds[job.optimizer](), config={**job.config, **extra})
    return engine


def step(engine: Any, number: int) -> float:
    """One step on data that depends on its number and the rank alone; the mean loss of all ranks."""
    torch.manual_seed(1000 * number + dist.get_rank())
    x = torch.randn(BATCH, WIDTH)
    first = next(engine.module.parameters())
    loss = (engine(x.to(first.dtype)).float() - x.flip(1)).square().mean()
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean / dist.get_world_size())


def said(engine: Any, moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")) -> dict[str, Any]:
    """By name the parameters, and of each trained one what is more exact and the moments, whole, as arrays."""
    found: dict[str, Any] = {}
    # 0.19.8 links moments in the first step of the first group, when other groups have none yet, and never again.
    link = getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None and moments:
        engine.optimizer._hp_optimizer_states_linked = False
        link()
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().float().numpy().copy()
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            found[f"{name}.master"] = safe_get_full_fp32_param(parameter).numpy().copy()
            for moment in moments:
                found[f"{name}.{moment}"] = safe_get_full_optimizer_state(parameter, moment).numpy().copy()
        else:
            stepped = _copy_of(engine.optimizer, parameter)
            found[f"{name}.master"] = stepped.detach().numpy().copy()
            state = getattr(engine.optimizer, "optimizer", engine.optimizer).state[stepped]
            for moment in moments:
                found[f"{name}.{moment}"] = state[moment].numpy().copy()
    return found


def _copy_of(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """What stage 0 steps for a parameter."""
    for models, copies in zip(
        getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=True
    ):
        for model, copy in zip(models, copies, strict=True):
            if model is parameter:
                return copy
    return parameter


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What is not the same, bit for bit."""
    names = sorted({*one, *other})
    return [
        name for name in names if name not in one or name not in other or one[name].tobytes() != other[name].tobytes()
    ]
