"""Multi-latent attention and `HybridModel`, saved in one layout and loaded in another, bit-equal by Megatron's words.

No CPU runs their layers, so they are built of Megatron's own linear ones and get random gradients. Stand-ins take the
place of what has no parameters, or needs a device to be imported: attention itself, and the norm of a Mamba layer.
"""

import dataclasses
import functools
import re

import pytest
import shardfast as sf
import torch
from jobs import Kind, Layout, begin, build, step, truth
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from test_layouts import expect_bits
from test_refused import error_of

try:
    from megatron.core.models.hybrid import hybrid_block, hybrid_model
except ImportError:
    hybrid_block = hybrid_model = None

needs_hybrid = pytest.mark.skipif(hybrid_model is None, reason="this Megatron-Core has no HybridModel")


class Attention(torch.nn.Module):
    """Attention between queries, keys and values, which has no parameters."""

    def __init__(self, **named):
        super().__init__()


class GatedNorm(torch.nn.Module):
    """The norm of a Mamba layer, without its kernel; its shards as Megatron's says them."""

    def __init__(self, size, *, device, dtype, **named):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        group = parallel_state.get_tensor_model_parallel_group()
        named = {"tp_group": group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets, **named
        )


def attention_of(spec):
    """The spec of a layer with the stand-in for attention."""
    spec.submodules.self_attention.submodules.core_attention = Attention
    return spec


def latent_model(config, **named):
    spec = attention_of(get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True))
    return GPTModel(config, spec, position_embedding_type="rope", **named)


def part_of(spec, *, module=TransformerLayer, mlp=False):
    """A layer that has the attention of another one, or its MLP."""
    of = spec.submodules
    names = ("pre_mlp_layernorm", "mlp", "mlp_bda") if mlp else ("input_layernorm", "self_attention", "self_attn_bda")
    return ModuleSpec(module, submodules=TransformerLayerSubmodules(**{name: getattr(of, name) for name in names}))


def hybrid(config, pattern, **named):
    """A model of Mamba layers (M), attention (*), multi-layer perceptrons (-) and experts (E)."""
    mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm = True, GatedNorm
    hybrid_block.TENorm = WrappedTorchNorm
    dense, experts = get_gpt_layer_local_spec(), get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    linear = mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=dense.submodules.input_layernorm,
        mixer=ModuleSpec(mamba_mixer.MambaMixer, submodules=linear),
        mamba_bda=get_bias_dropout_add,
    )
    stack = hybrid_block.HybridStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
        attention_layer=part_of(attention_of(dense)),
        mlp_layer=part_of(dense, module=MLPLayer, mlp=True),
        moe_layer=part_of(experts, mlp=True),
    )
    spec = ModuleSpec(hybrid_block.HybridStack, submodules=stack)
    return hybrid_model.HybridModel(config, spec, hybrid_layer_pattern=pattern, position_embedding_type="rope", **named)


def named(of, parameter):
    """The names of a parameter and of what its optimizer has for it."""
    moments = (f"optimizer/state.{parameter}.{moment}" for moment in ("exp_avg", "exp_avg_sq", "master", "step"))
    assert of.issuperset((f"model/{parameter}", *moments)), sorted(of)


LATENT = Kind(
    config=functools.partial(
        MLATransformerConfig,
        multi_latent_attention=True,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_head_dim=6,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
        qk_layernorm=True,
        rope_type="rope",
    ),
    model=latent_model,
)
MAMBA = Kind(
    config=functools.partial(TransformerConfig, mamba_state_dim=4, mamba_head_dim=6, mamba_num_groups=4),
    model=functools.partial(hybrid, pattern="M*-M"),
)
EXPERTS = dataclasses.replace(MAMBA, experts=4, model=functools.partial(hybrid, pattern="ME*E"))


def test_multi_latent_attention_in_another_layout(ranks, tmp_path):
    names = expect_bits(ranks, tmp_path, LATENT, [Layout(tp=2, pp=2)], [Layout(pp=2), Layout(), Layout(tp=4)])
    for part in ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj"):
        named(names, f"decoder.layers.3.self_attention.linear_{part}.weight")


@needs_hybrid
@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    [
        (MAMBA, [Layout(tp=2, pp=2)], [Layout(pp=2), Layout(), Layout(tp=4)]),
        (EXPERTS, [Layout(pp=2, ep=2)], [Layout(ep=4), Layout(tp=2, ep=2)]),
    ],
    ids=["dense", "experts"],
)
def test_a_hybrid_model_in_another_layout(ranks, tmp_path, kind, saved, loaded):
    names = expect_bits(ranks, tmp_path, kind, saved, loaded)
    named(names, "decoder.layers.0.mixer.in_proj.weight")
    named(
        names,
        "decoder.layers.3.mlp.experts.experts.linear_fc1.weight"
        if kind is EXPERTS
        else "decoder.layers.3.mixer.conv1d.bias",
    )


def in_one(rank, world, place):
    """What is stored of matrices that tensor parallelism cuts one by one, and what Megatron says these are."""
    begin(Layout(tp=2))
    chunks, optimizer = build(Layout(tp=2), MAMBA)
    step(chunks, optimizer, 0)
    sf.save(place, {"model": chunks, "optimizer": optimizer})
    said = truth(chunks, optimizer)
    if rank:
        return []
    found = []
    with sf.mapped(place) as checkpoint:
        for name, parts in (("in_proj.weight", "z x B C dt"), ("conv1d.weight", "x B C"), ("conv1d.bias", "x B C")):
            name = f"decoder.layers.0.mixer.{name}"
            for stored, key in ((f"model/{name}", name), (f"optimizer/state.{name}.exp_avg", f"{MOMENT}{name}")):
                whole = torch.cat([said[f"{key}.{part}"] for part in parts.split()])
                found.append(torch.equal(checkpoint[stored], whole))
    return found


MOMENT = "optimizer.state.exp_avg."


@needs_hybrid
def test_the_matrices_of_a_mamba_layer_lie_one_below_the_other(ranks, tmp_path):
    assert ranks(2)(in_one, str(tmp_path / "a"))[0] == [True] * 6


def numbered(rank, world, place):
    """The error of a save where a layer's matrices have numbers, which may be others on other ranks."""
    begin(Layout(tp=2))
    chunks, _ = build(Layout(tp=2), MAMBA)
    cut = mamba_mixer._split_tensor_factory
    mamba_mixer._split_tensor_factory = lambda of, sizes, names, axis: cut(of, sizes, ["0", *names[1:]], axis)
    return error_of(sf.save, place, {"model": chunks})


@needs_hybrid
def test_matrices_with_numbers_are_refused_by_name(ranks, tmp_path):
    for error in ranks(2)(numbered, str(tmp_path / "a")):
        assert re.search(
            r"its '(decoder\.layers\.0\.mixer\..*)' is cut into '\1\.0', .*, which are not understood", error
        )
