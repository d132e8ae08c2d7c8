"""A signal that tells a training to stop, beside the handler that Megatron's own loop sets for it."""

import os
import signal

import pytest
import shardfast as sf
import torch
from megatron.training.dist_signal_handler import DistributedSignalHandler

TOLD_AT = 4
STEPS = 10_000


def told(rank, world, run, is_before):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    made = {"every": sf.steps(1000), "on_signal": "SIGTERM"}
    ckpt = sf.Checkpointer(run, **made) if is_before else None
    with DistributedSignalHandler(signal.SIGTERM) as handler:
        ckpt = ckpt or sf.Checkpointer(run, **made)
        for step in range(1, STEPS):
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            if (rank, step) == (world - 1, TOLD_AT):
                os.kill(os.getpid(), signal.SIGTERM)
            ckpt.step(step, {"model": model, "optimizer": optimizer})
            received = handler.signals_received()  # as the loop with --exit-signal-handler asks after each step
            if ckpt.stopping:
                break
        ckpt.close()
    return step, received


@pytest.mark.parametrize("is_before", [True, False])
def test_all_ranks_stop_and_megatrons_handler_learns_of_it(ranks, tmp_path, is_before):
    run = tmp_path / "run"
    found = ranks(3)(told, str(run), is_before)
    (step,) = {step for step, _ in found}
    assert TOLD_AT <= step < STEPS - 1
    assert [path.parent.name for path in run.glob("*/COMMIT")] == [f"step-{step:08}"]
    assert [received for _, received in found] == [[0, 0, 1]] * 3
