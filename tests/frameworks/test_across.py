"""A small Llama under every way to train it: each loads what each other saved, with the optimizer, and trains on.

ZeRO keeps 16-bit parameters with copies in fp32, the others keep parameters in fp32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import deepspeed
import pytest
import shardfast as sf
import torch
import torch.distributed as dist
import transformers
from deepspeed_jobs import Job, differences, said
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

LENGTH, SAMPLES, VOCABULARY = 6, 12, 60
MOMENTS = ("exp_avg", "exp_avg_sq")
BEFORE, AFTER = 3, 20


class Trained(NamedTuple):
    """A model in training."""

    model: Any
    optimizer: Any

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=20,
            intermediate_size=30,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def fully_sharded(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp2_with_tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    for layer in model.model.layers:
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(layer, mesh["tp"], plan)
    return fully_sharded(model, mesh["dp"])


LAYOUTS: dict[str, tuple[int, Callable[[nn.Module], nn.Module]]] = {
    "DDP": (2, nn.parallel.DistributedDataParallel),
    "FSDP1": (2, fsdp1),
    "FSDP2": (3, lambda model: fully_sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)))),
    "FSDP2 × TP": (4, fsdp2_with_tp),
}
"""By kind the number of ranks, and what lays a model out on them."""

ZERO = {"ZeRO-1": (2, 1), "ZeRO-2": (3, 2), "ZeRO-3": (2, 3)}
"""By kind the number of ranks, and the stage."""

WORLDS = {kind: world for kind, (world, _) in (LAYOUTS | ZERO).items()}


def build(kind: str, seed: int) -> Trained:
    torch.manual_seed(seed)
    model = llama()
    if kind in ZERO:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        config = Job(ZERO[kind][1]).config | {"gradient_clipping": 0.0}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return Trained(engine, engine.optimizer)
    model = model if kind == "plain" else LAYOUTS[kind][1](model)
    return Trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))


def step(kind: str, trained: Trained, number: int) -> float:
    """One step on the samples of a number, of which each data rank has a share; the mean loss."""
    parts = 2 if kind == "FSDP2 × TP" else dist.get_world_size()
    part = dist.get_rank() // (dist.get_world_size() // parts)
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(number))
    ids = ids.chunk(parts)[part]
    loss = trained.model(input_ids=ids, labels=ids).loss.float()
    if kind in ZERO:
        trained.model.backward(loss)
        trained.model.step()
    else:
        loss.backward()
        trained.optimizer.step()
        trained.optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean / dist.get_world_size())


def whole(kind: str, trained: Trained) -> dict[str, Any]:
    """Parameters in fp32 and moments, whole, by the framework's own means."""
    if kind in ZERO:
        found = said(trained.model)
        rounded = [name for name in found if f"{name}.master" in found]
        for name in rounded:  # what a rank computes with is the copy, rounded
            exact = torch.from_numpy(found.pop(f"{name}.master"))
            assert torch.equal(torch.from_numpy(found[name]), exact.bfloat16().float()), name
            found[name] = exact.numpy()
        return found
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(trained.model, trained.optimizer, options=options)
    found = {name: tensor.numpy().copy() for name, tensor in model.items()}
    for name, state in optimizer["state"].items():
        found |= {f"{name}.{moment}": state[moment].numpy().copy() for moment in MOMENTS}
    return found


def saves(rank, world, place, kind):
    """Trains, saves and trains on; the state at the save, and the later losses."""
    trained = build(kind, 0)
    for number in range(BEFORE):
        step(kind, trained, number)
    sf.save(f"{place}/{kind}", trained.state)
    return whole(kind, trained), [step(kind, trained, number) for number in range(BEFORE, BEFORE + AFTER)]


def saves_plainly(rank, world, place, kinds):
    """What each kind saved, loaded by a plain model and saved again."""
    for kind in kinds:
        trained = build("plain", 1)
        sf.load(f"{place}/{kind}", trained.state)
        sf.save(f"{place}/{kind}, plain", trained.state)


def loads(rank, world, place, kind, sources):
    """By source the state after a load, the losses of further steps, and those after a load of the plain one."""
    found = {}
    for source in sources:
        trained = build(kind, 2)
        sf.load(f"{place}/{source}", trained.state)
        state = whole(kind, trained)
        losses = [step(kind, trained, number) for number in range(BEFORE, BEFORE + AFTER)]
        again = build(kind, 3)
        sf.load(f"{place}/{source}, plain", again.state)
        plainly = [step(kind, again, number) for number in range(BEFORE, BEFORE + AFTER)]
        found[source] = state, losses, plainly
    return found


@pytest.mark.parametrize("kinds", [tuple(WORLDS)], ids=["all"])
def test_each_goes_on_from_what_each_other_saved(ranks, tmp_path, kinds):
    saved = {kind: ranks(WORLDS[kind])(saves, str(tmp_path), kind)[0] for kind in kinds}
    ranks(1)(saves_plainly, str(tmp_path), kinds)
    for kind in kinds:
        loaded = ranks(WORLDS[kind])(loads, str(tmp_path), kind, kinds)[0]
        for source, (state, losses, plainly) in loaded.items():
            expected, later = saved[source]
            assert len(expected) == 3 * 21, source  # each parameter and its moments
            assert differences(expected, state) == [], (source, kind)
            assert losses == plainly, (source, kind)
            assert losses == pytest.approx(later, rel=0.02), (source, kind)  # layouts add in other orders
            if source == kind:
                assert losses == later
