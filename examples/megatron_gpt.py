"""A small GPT of Megatron-Core on CPUs: saved under tensor parallelism, resumed under pipeline parallelism.

It is trained on the Python standard library's own sources. The same checkpoints load under either layout::

    torchrun --nproc-per-node 2 examples/megatron_gpt.py runs/gpt --tp 2 --steps 20
    torchrun --nproc-per-node 2 examples/megatron_gpt.py runs/gpt --pp 2 --steps 40

With Megatron's own training loop, call ``shardfast.integrations.megatron.attach()`` before ``pretrain()`` instead.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import shardfast as sf
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

VOCABULARY, LENGTH, BATCH, WIDTH = 256, 64, 8, 64


class Attention(MegatronModule):
    """Megatron's own needs a GPU."""

    def __init__(self, config: TransformerConfig, *more: object, **named: object) -> None:
        super().__init__(config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *more: object, **named: object) -> Tensor:
        heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # of (sequence, batch, head, width)
        return scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def make_model(tp: int, pp: int) -> GPTModel:
    config = TransformerConfig(
        num_layers=4,
        hidden_size=WIDTH,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = Attention
    return GPTModel(
        *(config, layer, VOCABULARY, LENGTH),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="learned_absolute",
    )


def batch_of(step: int, sources: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of a step, and what follows each."""
    starts = torch.randint(len(sources) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    pieces = torch.stack([sources[start : start + LENGTH + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def train_step(model: GPTModel, step: int, sources: Tensor) -> Tensor | None:
    """One forward and backward pass; the loss on the last stage of the pipeline. Hidden states go to the next rank."""
    tokens, following = batch_of(step, sources)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    hidden = None
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.empty(LENGTH, BATCH, WIDTH, requires_grad=True)
        dist.recv(hidden.detach(), parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    output = model(tokens, positions, None, labels=following)
    loss = None
    if parallel_state.is_pipeline_last_stage():
        loss = output.mean()
        loss.backward()
    else:
        dist.send(output.detach(), parallel_state.get_pipeline_model_parallel_next_rank())
        gradient = torch.empty_like(output)
        dist.recv(gradient, parallel_state.get_pipeline_model_parallel_next_rank())
        output.backward(gradient)
    if hidden is not None:
        dist.send(hidden.grad, parallel_state.get_pipeline_model_parallel_prev_rank())
    return loss


def train(run: str, tp: int, pp: int, steps: int) -> None:
    parallel_state.initialize_model_parallel(tp, pp)
    torch.manual_seed(0)
    model = make_model(tp, pp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40])
    sources = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    state = {"model": model, "optimizer": optimizer}
    with sf.Checkpointer(run, every=sf.steps(10), keep=sf.last(2)) as checkpointer:
        for step in range(checkpointer.restore(state), steps):
            loss = train_step(model, step, sources)
            optimizer.step()
            optimizer.zero_grad()
            if loss is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
            checkpointer.step(step + 1, state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a directory, or a URL such as s3://bucket/run")
    for name in ("--tp", "--pp", "--steps"):
        parser.add_argument(name, type=int, default=1)
    dist.init_process_group("gloo")
    train(**vars(parser.parse_args()))
    dist.destroy_process_group()
