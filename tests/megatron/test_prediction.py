"""Multi-token prediction: its layers come through the same walk as those of the decoder."""

import shardfast as sf
import torch
from jobs import Layout, begin
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import TransformerConfig


def built(seed):
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        mtp_num_layers=1,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec()
    block = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(
        config, spec, vocab_size=64, max_sequence_length=8, position_embedding_type="rope", mtp_block_spec=block
    )


def differing(model, saved):
    return [name for name, one in model.named_parameters() if not torch.equal(one, saved[name])]


def lost(rank, world, place):
    begin(Layout(tp=2))
    model = built(0)
    saved = dict(model.named_parameters())
    sf.save(place, {"model": model})
    fresh = built(1)
    differed = [name for name, one in fresh.named_parameters() if not torch.equal(one, saved[name])]
    sf.load(place, {"model": fresh})
    with sf.mapped(place) as checkpoint:
        of_prediction = [name for name in checkpoint if "mtp" in name]
    return (
        differed,
        [name for name, one in fresh.named_parameters() if not torch.equal(one, saved[name])],
        of_prediction,
    )


def test_layers_of_prediction_come_back(ranks, tmp_path):
    for differed, left, of_prediction in ranks(2)(lost, str(tmp_path / "a")):
        assert any("mtp" in name for name in differed)
        assert left == []
        assert len(of_prediction) > 10
