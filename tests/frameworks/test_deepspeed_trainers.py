"""transformers' Trainer, accelerate and Lightning with DeepSpeed, which saves by the block in its configuration."""

import os
import shutil
import signal

import accelerate
import lightning
import pytest
import shardfast as sf
import torch
import transformers
from deepspeed_jobs import Job, differences, said
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DeepSpeedStrategy
from shardfast.integrations.deepspeed import newest
from transformers import Trainer  # here, as `transformers` imports it when it is asked for: once for all ranks

LENGTH = 12


def prepare(rank, world):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_DEEPSPEED": "true"}


def die_in_save(number):
    """Kills this process in its save ``number``, counted from one, which other ranks have begun or will begin.

    Earlier ones are durable.
    """
    original, begun = sf.save_async, []

    def save_async(*args, **named):
        if len(begun) == number - 1:
            for pending in begun:
                pending.committed()
            os.kill(os.getpid(), signal.SIGKILL)
        begun.append(original(*args, **named))
        return begun[-1]

    sf.save_async = save_async


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
    return Trainer(
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


def with_trainer(rank, world, place, stage, steps, batch, again, killed=0):
    prepare(rank, world)
    if killed and rank == 1:
        die_in_save(killed)
    one = trainer(place, stage, again, steps, batch)
    one.train(resume_from_checkpoint=newest(place) if again else None)
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


def test_a_trainer_that_is_killed_in_a_save_goes_on(ranks, tmp_path):
    whole, _ = ranks(2)(with_trainer, str(tmp_path / "whole"), 2, 6, 2, 0)[0]
    with pytest.raises(AssertionError):
        ranks(2)(with_trainer, str(tmp_path / "run"), 2, 6, 2, 0, 2)
    assert (tmp_path / "run" / "checkpoint-4" / "trainer_state.json").exists()
    assert not (tmp_path / "run" / "checkpoint-4" / "latest").exists()
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    assert ranks(2)(with_trainer, str(tmp_path / "run"), 2, 6, 2, 1)[0][0] == whole
    assert newest(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-6")
    other, _ = ranks(4)(with_trainer, str(tmp_path / "other"), 3, 6, 2, 1)[0]
    assert all(abs(other[step] - loss) < 1e-3 for step, loss in whole.items()), (whole, other)


def test_a_directory_that_was_not_saved_to_its_end_is_passed_over(tmp_path, caplog):
    assert newest(tmp_path / "none") is None
    for name in ("logs", "checkpoint-9", "checkpoint-10/global_step10/model", "checkpoint-11/global_step11/model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "checkpoint-11" / "latest").write_text("global_step11")
    (tmp_path / "checkpoint-9" / "latest").write_bytes(b"\xff")
    assert newest(tmp_path) is None
    assert {record.args[0].name for record in caplog.records} == {"checkpoint-9", "checkpoint-10", "checkpoint-11"}
    with pytest.raises(sf.Unsupported, match="expected a directory of a file system"):
        newest("s3://bucket/run")
    with pytest.raises(sf.Invalid, match="an engine saved there by itself"):
        newest(tmp_path / "checkpoint-11")


def test_the_newest_directory_is_that_of_the_latest_step(tmp_path):
    for name, step in {"best-0.9": 20, "checkpoint-1000-last": 1000, "checkpoint-500": 500, ".hidden-4": 4000}.items():
        sf.save(tmp_path / name / "tag", {"engine": {"global_steps": step}})
        (tmp_path / name / "latest").write_text("tag")
    assert newest(tmp_path) == str(tmp_path / "checkpoint-1000-last")
    (tmp_path / "checkpoint-2000" / "global_step2000").mkdir(parents=True)
    (tmp_path / "checkpoint-2000" / "global_step2000" / "mp_rank_00_model_states.pt").touch()  # as DeepSpeed writes it
    (tmp_path / "checkpoint-2000" / "latest").write_text("global_step2000")
    assert newest(tmp_path) == str(tmp_path / "checkpoint-2000")


def with_accelerate(rank, world, place, stage, again, killed=0):
    prepare(rank, world)
    if killed and rank == 1:
        die_in_save(killed)
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
            if killed and number == 1:
                torch.save(said(engine), f"{place}/first-{rank}.pt")
    expected = said(engine)
    engine.destroy()
    return expected


def test_accelerate_saves_its_state_to_one_place_again(ranks, tmp_path):
    expected, *_ = ranks(2)(with_accelerate, str(tmp_path / "a"), 1, False)
    for found in ranks(1)(with_accelerate, str(tmp_path / "a"), 2, True):
        assert differences(expected, found) == []
    assert not list(tmp_path.glob("a/.*.replaced"))


def test_accelerate_is_killed_while_it_saves_to_one_place_again(ranks, tmp_path):
    with pytest.raises(AssertionError):
        ranks(2)(with_accelerate, str(tmp_path / "a"), 1, False, 2)
    expected = torch.load(tmp_path / "a" / "first-0.pt", weights_only=False)
    for found in ranks(3)(with_accelerate, str(tmp_path / "a"), 2, True):
        assert differences(expected, found) == []


class OnCpu(DeepSpeedStrategy):
    """The strategy, which refuses a CPU before anything else."""

    def setup_environment(self):
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self):
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self):
        return torch.device("cpu", 0)  # DeepSpeed asks for its number


class Regression(lightning.LightningModule):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.GELU(), torch.nn.Linear(13, 1))
        self.losses = []

    def training_step(self, batch, number):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, prog_bar=False)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def with_lightning(rank, world, place, stage, epochs, again, killed=0):
    prepare(rank, world)
    if killed and rank == 1:
        die_in_save(killed)
    os.environ |= {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world)}
    generator = torch.Generator().manual_seed(5)
    data = torch.utils.data.TensorDataset(
        torch.randn(16, 7, generator=generator), torch.randn(16, 1, generator=generator)
    )
    saver = lightning.pytorch.callbacks.ModelCheckpoint(f"{place}/kept", monitor="loss", save_top_k=-1, save_last=True)
    one = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=OnCpu(config={**config(stage), "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}),
        plugins=[TorchElasticEnvironment()],
        max_epochs=epochs,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
    )
    module = Regression(7 if again else 0)
    one.fit(module, torch.utils.data.DataLoader(data, batch_size=2), ckpt_path=again)
    state = said(one.strategy.deepspeed_engine)
    one.strategy.deepspeed_engine.destroy()
    rates = [group["lr"] for group in one.optimizers[0].param_groups]
    return module.losses, state, one.global_step, rates, str(saver.best_model_score), saver.best_k_models


def test_lightning_goes_on(ranks, tmp_path):
    whole = ranks(2)(with_lightning, str(tmp_path / "whole"), 2, 4, None)[0]
    ranks(2)(with_lightning, str(tmp_path / "run"), 2, 2, None)
    last = str(tmp_path / "run" / "kept" / "last.ckpt")
    assert (tmp_path / "run" / "kept" / "last.ckpt" / "checkpoint" / "COMMIT").exists()
    losses, state, steps, rates, score, best = ranks(2)(with_lightning, str(tmp_path / "run"), 2, 4, last)[0]
    assert losses == whole[0][-len(losses) :]
    assert len(losses) == 8
    assert differences(whole[1], state) == []
    assert (steps, rates, score) == whole[2:5]
    assert len(best) == len(whole[5])
    other = ranks(4)(with_lightning, str(tmp_path / "run"), 3, 4, last)[0]
    assert other[3] == rates


def test_lightning_that_is_killed_in_a_save_goes_on(ranks, tmp_path):
    whole = ranks(2)(with_lightning, str(tmp_path / "whole"), 2, 4, None)[0]
    with pytest.raises(AssertionError):
        ranks(2)(with_lightning, str(tmp_path / "run"), 2, 4, None, 5)  # two saves at the end of each epoch
    found = newest(tmp_path / "run" / "kept")
    losses, state, steps, *_ = ranks(2)(with_lightning, str(tmp_path / "run"), 2, 4, found)[0]
    assert losses == whole[0][-len(losses) :]
    assert len(losses) == 8
    assert differences(whole[1], state) == []
    assert steps == whole[2]
    assert ranks(4)(with_lightning, str(tmp_path / "run"), 3, 3, found)[0][3] == whole[3]
