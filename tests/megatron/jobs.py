"""Small models of Megatron-Core with optimizers in any layout, and what their tensors are by Megatron's own words."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import megatron_on_cpu

megatron_on_cpu.install()
warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

try:
    from megatron.core.optimizer import layer_wise_optimizer
except ImportError:
    layer_wise_optimizer = None

megatron_on_cpu.repair()

LENGTH = 8
HAS_LAYERS = bool(importlib.util.find_spec("emerging_optimizers")) and hasattr(
    layer_wise_optimizer, "tag_params_for_buffer_routing"
)
"""Whether Muon and others step by layers here as in 0.18 and later."""


@dataclass(frozen=True)
class Layout:
    """How a job of Megatron is laid out; what is left of its ranks is data parallelism."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    """Tensor parallelism of experts; 0 for that of the others."""
    instances: int = 1
    distributed: bool = True
    """Whether its optimizer is the distributed one, or a layer-wise one for Muon and others."""
    in_buffers: bool = True
    """Whether a layer-wise optimizer divides parameters by the layout of buffers, not by their sizes alone."""

    fsdp: str = ""
    """How Megatron-FSDP shards, if it does."""

    def __str__(self) -> str:
        axes = {name: getattr(self, name) for name in ("tp", "pp", "vpp", "cp", "ep", "instances")}
        named = [f"{name}{size}" for name, size in axes.items() if size > 1]
        said = "x".join(named + [f"etp{self.etp}"] * bool(self.etp)) or "dp"
        said = f"{said}, {self.fsdp}" if self.fsdp else said
        said = said if self.in_buffers else f"{said}, by sizes"
        return said if self.distributed else f"{said}, plain optimizer"


@dataclass(frozen=True)
class Kind:
    """What is trained."""

    dtype: torch.dtype = torch.bfloat16
    layers: int = 4
    hidden: int = 24
    experts: int = 0
    tied: bool = False
    optimizer: str = "adam"
    vocabulary: int = 64
    divisible_by: int = 16
    """What the vocabulary is padded to a multiple of, times the tensor parallelism."""

    overlaps: bool = False
    """Whether parameters are gathered in the next forward pass."""

    ffn: int = 28
    channels: int = 4
    """Of each of 8 heads of attention."""

    biases: bool = False
    """Whether linear layers have biases, those of experts under tensor parallelism included."""

    config: Callable[..., TransformerConfig] = TransformerConfig
    """Makes the configuration of the model."""

    model: Callable[..., Any] | None = None
    """Makes the part of the model that a rank has, if that is no `GPTModel` of these layers."""

    @property
    def is_emerging(self) -> bool:
        """Whether its optimizer is one of the package emerging-optimizers."""
        return self.optimizer not in ("adam", "sgd")


def begin(layout: Layout) -> None:
    """Makes the process groups, again and again in one process: threads of groups that are left would fill it."""
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    make_groups(layout)


def make_groups(layout: Layout) -> None:
    """Makes the process groups where there are none."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or None,
        num_distributed_optimizer_instances=layout.instances,
        create_gloo_process_groups=dist.get_backend() == "gloo",
    )


def config_of(layout: Layout, kind: Kind) -> TransformerConfig:
    experts = {}
    if kind.experts:
        experts = {
            "num_moe_experts": kind.experts,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp or None,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
        }
    config = kind.config(
        num_layers=kind.layers,
        hidden_size=kind.hidden,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=kind.channels,
        ffn_hidden_size=kind.ffn,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_dtype=kind.dtype,
        params_dtype=kind.dtype,
        bf16=kind.dtype is torch.bfloat16,
        fp16=kind.dtype is torch.float16,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        **experts,
    )
    config.add_bias_linear = kind.biases  # set here: of experts under tensor parallelism its constructor refuses them
    return config


def _gpt(config: TransformerConfig, experts: int | None, **named: Any) -> GPTModel:
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False)
    return GPTModel(config, spec, position_embedding_type="rope", **named)


def _chunk(config: TransformerConfig, layout: Layout, kind: Kind, stage: int | None) -> Any:
    multiple = kind.divisible_by * layout.tp
    make = kind.model or functools.partial(_gpt, experts=kind.experts or None)
    model = make(
        config,
        vocab_size=-(-kind.vocabulary // multiple) * multiple,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=kind.tied,
        vp_stage=stage,
    )
    for name, parameter in model.named_parameters():
        if name.endswith("router.bias"):  # up to 0.15 it is what the memory held, another value on each rank
            torch.nn.init.zeros_(parameter)
    if config.bf16 or config.fp16:
        model = Float16Module(config, model)
    is_layer_wise = layout.distributed and kind.is_emerging
    said = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed and (layout.in_buffers or not is_layer_wise),
        overlap_grad_reduce=kind.overlaps,
        overlap_param_gather=kind.overlaps,
        num_distributed_optimizer_instances=layout.instances,
    )
    if layout.fsdp:
        said.use_megatron_fsdp, said.data_parallel_sharding_strategy = True, layout.fsdp
        return FullyShardedDataParallel(config, said, model, device=torch.device("cpu"))
    named = {"full_param_layout": _layout_of_buffers(model, said)} if is_layer_wise and layout.in_buffers else {}
    return DistributedDataParallel(config, said, model, disable_bucketing=bool(stage), **named)


def _layout_of_buffers(model: Any, said: DistributedDataParallelConfig) -> Any:
    """Where the parameters of a model lie in buffers such that each rank has whole ones, as `pretrain` asks for it."""
    layer_wise_optimizer.tag_params_for_buffer_routing([model])
    return layer_wise_optimizer.LayerWiseDistributedOptimizer.compute_full_param_layout(
        list(model.parameters()),
        said.bucket_size,
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        said,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(),
    )


def build(layout: Layout, kind: Kind, seed: int = 0) -> tuple[list[Any], Any]:
    """The chunks of the model that this rank has, and the optimizer."""
    torch.manual_seed(seed)
    config = config_of(layout, kind)
    stages = [None] if layout.vpp == 1 else list(range(layout.vpp))
    chunks = [_chunk(config, layout, kind, stage) for stage in stages]
    named = {"use_layer_wise_distributed_optimizer": layout.distributed} if kind.is_emerging else {}
    said = OptimizerConfig(
        optimizer=kind.optimizer,
        lr=1e-2,
        weight_decay=0.01,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=layout.distributed and not kind.is_emerging,
        clip_grad=0.0,
        **named,
    )
    return chunks, get_megatron_optimizer(said, chunks, use_gloo_process_groups=dist.get_backend() == "gloo")


def step(chunks: list[Any], optimizer: Any, seed: int) -> None:
    """A step with random gradients: the same for all replicas, others for each part of a model."""
    optimizer.zero_grad()
    for number, chunk in enumerate(chunks):
        chunk.zero_grad_buffer()
        is_sharded = hasattr(chunk, "param_and_grad_buffer")
        for index, parameter in enumerate(chunk.module.raw_param.values() if is_sharded else chunk.parameters()):
            # A shared embedding is on several stages, whose gradients Megatron adds up.
            is_shared = getattr(parameter, "shared_embedding", False)
            place = [0, 0, 0] if is_shared else [number, index, parallel_state.get_pipeline_model_parallel_rank()]
            is_cut = getattr(parameter, "tensor_model_parallel", False)
            is_expert = not getattr(parameter, "allreduce", True)
            among = "expert_tensor" if is_expert else "tensor_model"
            place.append(getattr(parallel_state, f"get_{among}_parallel_rank")() if is_cut else 0)
            place.append(parallel_state.get_expert_model_parallel_rank() if is_expert else 0)
            torch.manual_seed(functools.reduce(lambda known, of: 100 * known + of, place, seed))
            if is_sharded:
                _give(chunk.param_and_grad_buffer, parameter)
            else:
                parameter.main_grad.copy_(torch.randn_like(parameter.main_grad))
                parameter.grad_added_to_main_grad = True
        if is_sharded:
            chunk.param_and_grad_buffer.update_main_grads()
            end_gathering(chunk)  # as finish_grad_sync() does
        else:
            chunk.finish_grad_sync()
    assert optimizer.step()[0]


def end_gathering(chunk: Any) -> None:
    """Lets a chunk of Megatron-FSDP gather its parameters anew. Up to 0.17 the module inside does."""
    owner = chunk if hasattr(chunk, "synchronize_param_gather") else chunk.module
    owner.synchronize_param_gather()


def _give(buffers: Any, parameter: torch.Tensor) -> None:
    """A random gradient for a parameter that Megatron-FSDP shards, as for one of its DDP."""
    group = buffers.parameter_groups[buffers.param_to_param_group[parameter]]
    gradients = group.main_grad_buffer
    gradient = torch.randn(parameter.shape, dtype=gradients.dtype)
    if group.is_expert_param:  # DDP takes the mean over all data, of which an expert's replicas have a part
        gradient /= parallel_state.get_expert_model_parallel_world_size()
    gradients.set_item(gradients.param_idx[parameter], gradient)


def truth(chunks: list[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """All tensors of the job, whole, by Megatron's own `fully_reshardable`; on rank 0."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    of_chunks = [chunk.sharded_state_dict(metadata=metadata) for chunk in chunks]
    models = {f"model{number}" if len(of_chunks) > 1 else "model": of for number, of in enumerate(of_chunks)}
    of_optimizer = optimizer.sharded_state_dict(models if len(of_chunks) > 1 else of_chunks[0], metadata=metadata)
    said = {**models, "optimizer": of_optimizer}
    apply_factories(said)
    mine = []
    for tensor in nested_values(said):
        if isinstance(tensor, ShardedTensor):
            box = (*[1] * tensor.prepend_axis_num, *tensor.local_shape)
            key = tensor.key.replace("fp32_param", "param").replace("module.", "")
            mine.append((key, tensor.global_shape, tensor.global_offset, box, tensor.data.detach().clone()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole: dict[str, torch.Tensor] = {}
    for key, shape, offsets, box, data in (tensor for of in everyone for tensor in of):
        into = whole.setdefault(key, torch.full(shape, float("nan"), dtype=data.dtype))
        into[tuple(slice(at, at + size) for at, size in zip(offsets, box, strict=True))] = data.reshape(box)
    return whole


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The names of what differs by a bit. Only some optimizers list parameters in fp32 among what they have."""
    own = "optimizer.state.param."
    exact = {own + name for name, tensor in one.items() if tensor.dtype is torch.float32}
    alone = (one.keys() ^ other.keys()) - exact
    return sorted({*alone, *(name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name]))})
