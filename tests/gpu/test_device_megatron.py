"""Megatron-Core on a device, without TransformerEngine: the distributed optimizer, saved while the training goes on."""

import importlib.util

import pytest
import shardfast as sf
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not there")


def built(seed):
    """A GPT in bf16 on the device, in Megatron's DDP, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=16)
    said = DistributedDataParallelConfig(use_distributed_optimizer=True)
    chunk = DistributedDataParallel(config, said, Float16Module(config, model.cuda()))
    adam = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=0.0,
    )
    return [chunk], get_megatron_optimizer(adam, [chunk], use_gloo_process_groups=False)


def step(chunks, optimizer, seed):
    """A step with random gradients."""
    optimizer.zero_grad()
    generator = torch.Generator("cuda").manual_seed(seed)
    for chunk in chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.normal_(generator=generator)
            parameter.grad_added_to_main_grad = True
        chunk.finish_grad_sync()
    assert optimizer.step()[0]


def tensors(chunks, optimizer):
    """Copies of the parameters, and of what the optimizer steps with its state."""
    found = [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            for stepped in group["params"]:
                state = one.optimizer.state[stepped]
                found += [stepped.detach().clone(), *(state[name].clone() for name in sorted(state))]
    return found


@pytest.fixture
def groups(tmp_path, device):
    """One rank, whose process groups are on the device."""
    from megatron.core import parallel_state

    store = dist.FileStore(f"{tmp_path}/rendezvous", 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.usefixtures("groups")
def test_a_save_while_megatron_trains_comes_back_bit_for_bit(tmp_path):
    trained, fresh = built(0), built(1)
    for number in range(2):
        step(*trained, number)
    before = tensors(*trained)
    pending = sf.save_async(tmp_path / "saved", {"model": trained[0], "optimizer": trained[1]})
    for number in range(2, 4):
        step(*trained, number)
    pending.committed()
    assert not all(map(torch.equal, tensors(*trained), before))
    sf.load(tmp_path / "saved", {"model": fresh[0], "optimizer": fresh[1]})
    found = tensors(*fresh)
    assert len(found) == len(before) > 20
    assert all(map(torch.equal, found, before))
    for number in range(2, 4):
        step(*fresh, number)
    assert all(map(torch.equal, tensors(*fresh), tensors(*trained)))
