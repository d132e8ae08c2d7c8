"""A model in parts on Ray's workers, saved by Shardfast: Ray names its checkpoints, keeps the best, and copies none.

A second call goes on where the first has saved last, on any number of workers. So does Ray when a worker dies::

    python examples/ray_train.py ./ray --steps 20
    python examples/ray_train.py s3://bucket/ray --steps 40 --workers 3
"""

import argparse
import os

import ray.train
import shardfast as sf
import shardfast.integrations.ray as shardfast_ray
import torch
from ray.train.torch import TorchTrainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(config: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (ray.train.get_context().get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    ckpt = sf.Checkpointer(shardfast_ray.run_url(), every=sf.steps(5), keep=sf.last(1))
    for step in range(shardfast_ray.restore(ckpt, state), config["steps"]):
        rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if ckpt.step(step + 1, state):  # returns at once, as does the report
            shardfast_ray.report({"step": step + 1, "loss": loss.item()}, ckpt)
    ckpt.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("storage", help="a directory, or a URL such as s3://bucket/ray")
    parser.add_argument("--steps", type=int, default=20, help="train up to this step")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    keep = ray.train.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    storage = given.storage if "://" in given.storage else os.path.abspath(given.storage)
    config = ray.train.RunConfig(
        "sum", storage_path=storage, checkpoint_config=keep, failure_config=ray.train.FailureConfig(max_failures=3)
    )
    scaling = ray.train.ScalingConfig(num_workers=given.workers)
    result = TorchTrainer(
        train, train_loop_config={"steps": given.steps}, scaling_config=scaling, run_config=config
    ).fit()
    checkpoint, metrics = min(result.best_checkpoints or [], key=lambda one: one[1]["loss"])
    print(f"best: step {metrics['step']}, loss {metrics['loss']:.4f}, {shardfast_ray.url_of(checkpoint)}")


if __name__ == "__main__":
    main()
