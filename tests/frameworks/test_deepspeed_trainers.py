"""transformers' Trainer and accelerate with DeepSpeed, which saves by the block in its configuration."""

import os

import accelerate
import pytest
import shardfast.integrations.deepspeed  # noqa: F401  # what is tested
import torch
import transformers
from deepspeed_jobs import Job, differences, said

LENGTH = 12


def prepare(rank, world):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_DEEPSPEED": "true"}


def config(stage, **block):
    return {
        **Job(stage, "fp32").config,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "shardfast": block,
    }


def language_model(seed):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=60,
            hidden_size=16,
            intermediate_size=30,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        ids = torch.randint(60, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids}


class Stop(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop = state.global_step >= self.step


def trainer(place, stage, seed, steps, batch):
    return transformers.Trainer(
        language_model(seed),
        transformers.TrainingArguments(
            place,
            max_steps=6,
            per_device_train_batch_size=batch,
            save_steps=2,
            save_strategy="steps",
            logging_steps=1,
            learning_rate=1e-2,
            deepspeed=config(stage),
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Texts(),
        callbacks=[Stop(steps)],
    )


def losses(one):
    return {entry["step"]: entry["loss"] for entry in one.state.log_history if "loss" in entry}


def with_trainer(rank, world, place, stage, steps, batch, again):
    prepare(rank, world)
    one = trainer(place, stage, again, steps, batch)
    one.train(resume_from_checkpoint=bool(again))
    one.model_wrapped.destroy()
    return losses(one), said(one.model_wrapped) if not again else None


@pytest.mark.smoke
def test_a_trainer_goes_on(ranks, tmp_path):
    whole, _ = ranks(2)(with_trainer, str(tmp_path / "whole"), 2, 6, 2, 0)[0]
    ranks(2)(with_trainer, str(tmp_path / "run"), 2, 4, 2, 0)
    same, _ = ranks(2)(with_trainer, str(tmp_path / "run"), 2, 6, 2, 1)[0]
    assert same == whole
    assert (tmp_path / "run" / "checkpoint-6" / "latest").read_text() == "global_step6"
    assert (tmp_path / "run" / "checkpoint-6" / "global_step6" / "COMMIT").exists()


def test_a_trainer_goes_on_in_another_world_and_stage(ranks, tmp_path):
    whole, _ = ranks(2)(with_trainer, str(tmp_path / "whole"), 2, 6, 2, 0)[0]
    ranks(2)(with_trainer, str(tmp_path / "run"), 2, 4, 2, 0)
    other, _ = ranks(4)(with_trainer, str(tmp_path / "run"), 3, 6, 2, 1)[0]
    assert all(abs(other[step] - loss) < 1e-3 for step, loss in whole.items()), (whole, other)


def with_accelerate(rank, world, place, stage, again):
    prepare(rank, world)
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config(stage), zero3_init_flag=False)
    one = accelerate.Accelerator(deepspeed_plugin=plugin)
    model = language_model(3 if again else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Texts(), batch_size=2)
    engine, optimizer, loader = one.prepare(model, optimizer, loader)
    if again:
        one.load_state(place)
        return said(engine)
    for number, batch in zip(range(3), loader, strict=False):
        one.backward(engine(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if number:
            one.save_state(place)  # to one place and tag again and again
    expected = said(engine)
    engine.destroy()
    return expected


def test_accelerate_saves_its_state_to_one_place_again(ranks, tmp_path):
    expected, *_ = ranks(2)(with_accelerate, str(tmp_path / "a"), 1, False)
    for found in ranks(1)(with_accelerate, str(tmp_path / "a"), 2, True):
        assert differences(expected, found) == []
    assert not list(tmp_path.glob("a/.*.replaced"))
