"""A training of Lightning's that a signal tells to stop, beside Lightning's own handlers of that signal."""

import contextlib
import os
import signal

import lightning
import pytest
import shardfast as sf
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy

TOLD_AFTER = 5


class Net(lightning.LightningModule):
    def __init__(self, name):
        super().__init__()
        self.name, self.net = name, torch.nn.Linear(8, 8)

    def training_step(self, batch, number):
        if number == TOLD_AFTER:
            os.kill(os.getpid(), signal.Signals[self.name])
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Saves(Callback):
    """Saves by a `Checkpointer` that is made before Lightning sets its handlers, or after that."""

    def __init__(self, run, name, is_before):
        self.run, self.name, self.is_before = run, name, is_before
        self.stopped, self.raised = [], None

    def make(self):
        self.ckpt = sf.Checkpointer(self.run, every=sf.steps(1000), on_signal=self.name)

    def setup(self, trainer, module, stage):
        if self.is_before:
            self.make()

    def on_train_start(self, trainer, module):
        if not self.is_before:
            self.make()

    def on_train_batch_end(self, trainer, module, *_):
        self.ckpt.step(trainer.global_step, {"model": module, "optimizer": trainer.optimizers[0]})
        if self.ckpt.stopping:
            self.stopped.append(trainer.global_step)
            trainer.should_stop = True

    def on_exception(self, trainer, module, exception):
        self.raised = type(exception).__name__

    def teardown(self, trainer, module, stage):
        self.ckpt.close()


def told(rank, world, place, name, is_before):

    os.environ |= {
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": str(world),
        "SLURM_JOB_NAME": "x",
        "SLURM_NODELIST": "127.0.0.1",
    }
    os.environ |= {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PATH": f"{place}/bin:{os.environ['PATH']}"}
    saves = Saves(f"{place}/run", name, is_before)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=DDPStrategy(),
        plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)],
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=1,
        limit_val_batches=0,
        default_root_dir=place,
    )
    with contextlib.suppress(SystemExit):
        trainer.fit(Net(name), torch.utils.data.DataLoader(torch.randn(400, 8), batch_size=4))
    return saves.stopped, saves.raised


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_all_ranks_stop_and_lightnings_handlers_run_too(ranks, tmp_path, name, is_before):
    requeue = tmp_path / "bin" / "scontrol"
    requeue.parent.mkdir()
    requeue.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/requeued\n')
    requeue.chmod(0o755)
    found = ranks(2)(told, str(tmp_path), name, is_before)
    step = TOLD_AFTER + 1
    assert [stopped for stopped, _ in found] == [[step]] * 2
    assert [path.parent.name for path in (tmp_path / "run").glob("*/COMMIT")] == [f"step-{step:08}"]
    # Lightning asks for SIGUSR1 only if nobody has it yet, and ends the training itself at SIGTERM.
    is_requeued = name == "SIGUSR1" and not is_before
    assert (tmp_path / "requeued").exists() == is_requeued
    assert [raised for _, raised in found] == ["SIGTERMException" if name == "SIGTERM" else None] * 2
