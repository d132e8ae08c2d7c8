"""Jobs that train with Megatron's own `pretrain`, whole, on the CPU; each returns what the test compares."""

import inspect
import logging
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import loop_on_cpu

loop_on_cpu.install()
warnings.filterwarnings("ignore")

import jobs
import numpy as np
import shardfast as sf
import torch
from megatron.core import tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import async_utils, checkpointing, get_args, pretrain, set_startup_timestamps, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from shardfast.integrations import megatron as integration
from shardfast.integrations import megatron_arguments

loop_on_cpu.repair()

_MODEL = """
--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --position-embedding-type rope --swiglu --disable-bias-linear --bf16
--tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 4
--attention-dropout 0.1 --hidden-dropout 0.1
"""
_TRAINING = """
--micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 1e-2 --min-lr 1e-3 --use-distributed-optimizer
--mock-data --num-workers 0 --log-interval 1 --eval-interval 1000 --eval-iters 0 --dist-ckpt-optim-fully-reshardable
"""
_ON_A_CPU = """
--distributed-backend gloo --transformer-impl local --use-cpu-initialization
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion
--no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --no-check-for-nan-in-loss-and-grad
"""
ARGUMENTS = f"{_MODEL}{_TRAINING}{_ON_A_CPU}".split()


def datasets(counts, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=args.seq_length,
        blend=None,
        blend_per_split=None,
        split="98,2,0",
        path_to_cache=None,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, counts, lambda: True, config).build()


datasets.is_distributed = True


def trained(arguments, on_step=lambda number: None):
    """The losses of this rank's microbatches, as hexadecimal texts, and the exit code."""
    losses, batches = [], 0

    def forward_step(iterator, model, *more, **named):
        nonlocal batches
        batches += 1
        on_step(batches)
        batch = next(iterator)
        output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])

        def loss(per_token):
            mean = per_token.float().mean()
            losses.append(mean.item().hex())
            return mean, {"lm loss": mean.detach()}

        return output, loss

    sys.argv[1:] = [*ARGUMENTS, *arguments]
    set_startup_timestamps(program_start=time.time(), main_entry=time.time())
    args = parse_and_validate_args(args_defaults={})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    code = None
    try:
        pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    except SystemExit as end:
        code = end.code
    return losses, code


def train(rank, world, arguments, is_attached=True):
    """A job of `pretrain`; with `is_attached` it saves and loads with Shardfast."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    if is_attached:
        integration.attach()
    return trained(arguments)


def die_in_a_save(rank, world, place, iteration, arguments):
    """The last rank is killed when rank 0 has begun to save an iteration, and rank 0 when it has noticed."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    integration.attach()
    directory = Path(place) / f"iter_{iteration:07d}"

    def end():
        os.kill(os.getpid(), signal.SIGKILL)

    def killing(save):
        def killed(url, state, *, step):
            if step != iteration:
                return save(url, state, step=step)
            training.maybe_finalize_async_save(blocking=True)
            if rank == world - 1:
                while not directory.exists():
                    time.sleep(0.01)
                end()
            try:
                return save(url, state, step=step)
            except sf.Error:
                return end()

        return killed

    sf.save, sf.save_async = killing(sf.save), killing(sf.save_async)
    trained(arguments)


def train_until_sigterm(rank, world, batch, arguments):
    """Rank 0 gets a SIGTERM in one of its steps."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    integration.attach()
    return trained(arguments, lambda number: number == batch and not rank and os.kill(os.getpid(), signal.SIGTERM))


def call(rank, world, scenario, arguments):
    """What a scenario returns, which gets the training's objects at the place of its steps."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    integration.attach()
    found = []

    def steps(forward_step, model, optimizer, scheduler, *more, **named):
        found.append(scenario(Training(rank, model, optimizer, scheduler)))
        raise SystemExit

    training.train = steps
    trained(arguments)
    return found[0]


class Training:
    """The objects of a training, and calls of Megatron's functions with them."""

    def __init__(self, rank, model, optimizer, scheduler):
        self.rank, self.model, self.optimizer, self.scheduler = rank, model, optimizer, scheduler
        self.args = get_args()

    def step(self, seed):
        jobs.step(self.model, self.optimizer, seed)
        self.scheduler.step(self.args.global_batch_size)
        self.args.consumed_train_samples += self.args.global_batch_size

    def save(self, iteration, **named):
        checkpointing.save_checkpoint(iteration, self.model, self.optimizer, self.scheduler, 1000 * iteration, **named)

    def load(self, **named):
        return checkpointing.load_checkpoint(self.model, self.optimizer, self.scheduler, **named)

    def finish(self):
        """Waits for asynchronous saves."""
        training.maybe_finalize_async_save(blocking=True)

    def error_of(self, function, *arguments, **named):
        try:
            function(*arguments, **named)
        except (sf.Error, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def weights(self):
        return [parameter.detach().clone() for chunk in self.model for parameter in chunk.parameters()]

    def optimizer_state(self):
        """Moments, counters and masters of this rank."""
        state = [self.scheduler.num_steps]
        for group in self.optimizer.chained_optimizers[0].optimizer.param_groups:
            for master in group["params"]:
                held = self.optimizer.chained_optimizers[0].optimizer.state[master]
                state += [master.detach().clone(), *(held[name].clone() for name in sorted(held))]
        return state


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True)
    )


def draws():
    """One number of each random generator."""
    return random.random(), np.random.rand(), torch.rand(1).item()


def tracker_states():
    return {name: state.tolist() for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()}


def replaced():
    """Checks what `attach()` replaces."""
    names = ("save_checkpoint", "load_checkpoint")
    before = {name: getattr(training, name) for name in names}
    assert all(before[name] is getattr(checkpointing, name) for name in names)
    assert before["save_checkpoint"].__module__ == "megatron.training.checkpointing"
    assert not any(hasattr(function, "__wrapped__") for function in before.values())
    integration.attach()
    first = {name: getattr(training, name) for name in names}
    integration.attach()
    for name in names:
        now = getattr(training, name)
        assert now is getattr(checkpointing, name) is first[name] is not before[name]
        assert now.__wrapped__ is before[name]
        assert inspect.signature(now) == inspect.signature(before[name])
    said = []
    with mock.patch.object(logging.getLogger("shardfast"), "warning", lambda *text: said.append(text[0] % text[1:])):
        megatron_arguments.warn_of_version("0.19.3")
        megatron_arguments.warn_of_version("0.18.2")
    assert said == ["attach(): megatron-core is 0.18.2; its training loop was tried with 0.19"]
    assert training.maybe_finalize_async_save is async_utils.maybe_finalize_async_save
    return True
