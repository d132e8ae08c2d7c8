"""A Trainer of transformers on a device: saved from page-locked memory while it trains, resumed with its losses."""

import importlib.util

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not there")

WIDTH = 512


class Net(nn.Module):
    """Layers with dropout, whose random state on the device is part of a training."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(8)))

    def forward(self, x, labels=None):
        loss = (self.layers(x) - x).square().mean()
        return {"loss": loss}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(number)), "labels": 0}


def trained(place, seed, resume=None):
    """The losses by step, and the parameters at the end."""
    import transformers
    from shardfast.integrations.transformers import attach

    arguments = transformers.TrainingArguments(
        str(place),
        max_steps=6,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=True,
    )
    trainer = transformers.Trainer(Net(seed), arguments, train_dataset=Rows())
    attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return losses, [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("step", [2, 4])
def test_a_trainer_goes_on_with_the_same_losses(tmp_path, step):
    losses, parameters = trained(tmp_path, 0)
    resumed, found = trained(tmp_path, 7, f"{tmp_path}/checkpoint-{step}")
    assert resumed == losses  # those before the step are in the checkpoint
    assert all(one.is_cuda for one in found)
    assert all(map(torch.equal, found, parameters))
