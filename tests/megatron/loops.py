"""Jobs that train with Megatron's own `pretrain`, whole, on the CPU; each returns what the test compares."""

import contextlib
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import loop_on_cpu

loop_on_cpu.install()
warnings.filterwarnings("ignore")

import shardfast as sf
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain, set_startup_timestamps
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from shardfast.integrations import megatron as integration

loop_on_cpu.repair()

ARGUMENTS = """
--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 1e-2 --min-lr 1e-3 --bf16
--tokenizer-type NullTokenizer --vocab-size 60 --mock-data --num-workers 0 --use-distributed-optimizer
--distributed-backend gloo --transformer-impl local --use-cpu-initialization
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion
--no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --no-check-for-nan-in-loss-and-grad
--position-embedding-type rope --swiglu --disable-bias-linear --attention-dropout 0.1 --hidden-dropout 0.1
--log-interval 1 --eval-interval 1000 --eval-iters 0 --dist-ckpt-optim-fully-reshardable
""".split()


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
    save, directory = sf.save, Path(place) / f"iter_{iteration:07d}"

    def killed(url, state, *, step):
        if step == iteration:
            if rank == world - 1:
                while not directory.exists():
                    time.sleep(0.01)
            else:
                with contextlib.suppress(sf.Error):
                    save(url, state, step=step)
            os.kill(os.getpid(), signal.SIGKILL)
        save(url, state, step=step)

    sf.save = killed
    trained(arguments)
