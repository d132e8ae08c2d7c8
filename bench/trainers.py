"""accelerate, transformers' Trainer, Lightning and torchtitan with our integrations, beside their own checkpoints.

`run.py` starts it in an environment that has them: `trainers.py SETTINGS ANSWER`.

A save is the trainer's own function, called as its loop calls it, on objects that the trainer has prepared. A load is
what the trainer calls to resume, into new objects; the modules' and the trainer's making is not timed.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from figures import ACCELERATE, OURS, Figures
from ranks import Settings, answer, asked, run, timed
from rivals import show_notes, sync_files_of_rank
from torch import nn
from torch.distributed.tensor import DTensor
from trained import Digests, Maker, loads_of, saves_of, show_loads, show_saves

PROCESSES, GIGABYTES = 2, 0.5
TRANSFORMERS, LIGHTNING, TITAN = "transformers", "Lightning", "torchtitan"
DDP, FSDP2 = "DDP", "FSDP2"

NOT_MEASURED = {
    f"{TRANSFORMERS}, {FSDP2}": "`distributed_config` saves the model alone, and "
    "`TrainingArguments(fsdp=…)` needs a device",
    f"{TITAN}, torch_checkpointing": "its manager saves and loads nothing yet (NotImplementedError)",
}

WIDTH, BATCH = 1024, 4
BYTES_OF_PARAMETER = 12
"""The fp32 weight and two moments."""

LENGTH = 16
ELASTIC = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
"""For Lightning, which finds its ranks there."""

CHECKPOINT = "one.ckpt"
"""Lightning's, a file or a directory."""

SYNCED = "files and directories synced for it, which counts for the durable save and not for the stall"


class Net(nn.Module):
    """Square layers with a sum around each."""

    def __init__(self, total_bytes: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        count = max(2, round(total_bytes / BYTES_OF_PARAMETER / (WIDTH * (WIDTH + 1))))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) / len(self.layers)
        return x


def _loss(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(BATCH, WIDTH)).square().mean()
    return loss


def _digests(parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> Digests:
    """Of this rank's parts of parameters and of what the optimizer has of them."""
    found: Digests = {}
    for name, parameter in parameters:
        tensors = {"": parameter.detach(), **optimizer.state[parameter]}
        for part, value in tensors.items():
            value = value.to_local() if isinstance(value, DTensor) else value
            found[f"{name} {part}"] = hashlib.sha256(value.contiguous().numpy().reshape(-1)).digest()
    return found


def _clocked(spent: list[float], owner: Any, *names: str) -> None:
    """Replaces methods of an object by some that add the seconds of their calls to ``spent``."""
    for name in names:
        method = getattr(owner, name)

        def call(*args: Any, _method: Callable[..., Any] = method, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return _method(*args, **named)
            finally:
                spent.append(time.perf_counter() - began)

        setattr(owner, name, call)


class Kept:
    """A training by hand: a model and its optimizer, each step the same on all ranks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model: Any = None
        self.optimizer: Any = None

    @property
    def is_ours(self) -> bool:
        return self.name == OURS

    def step(self) -> None:
        _loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def before_step(self) -> None:
        """Does nothing: ours waits in the optimizer's step, and a trainer's own save is over."""

    def finish(self, place: Path) -> None:
        if self.is_ours:
            self.settle()
        else:
            sync_files_of_rank(place)

    def settle(self) -> None:
        raise NotImplementedError

    def digests(self) -> Digests:
        return _digests(self.model.named_parameters(), self.optimizer)

    def close(self) -> None:
        for name in list(vars(self)):
            if name != "name":
                delattr(self, name)
        gc.collect()


class OfAccelerate(Kept):
    """Saved and loaded by `Accelerator.save_state()` and `load_state()`."""

    def __init__(self, name: str, form: str, total_bytes: int, seed: int) -> None:
        super().__init__(name)
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState, GradientState, PartialState
        from accelerate.utils import DistributedType
        from shardfast.integrations.accelerate import attach

        for singleton in (AcceleratorState, GradientState, PartialState):
            singleton._shared_state.clear()
        plugin = None
        if form == FSDP2:
            PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="no_wrap", state_dict_type="SHARDED_STATE_DICT"
            )
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        if self.is_ours:
            attach(self.accelerator)
        net = Net(total_bytes, seed)
        self.model, self.wrapper = self.accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
        self.optimizer = self.wrapper.optimizer
        if isinstance(next(self.model.parameters()), DTensor) != (form == FSDP2):
            raise AssertionError(f"accelerate made no {form}")

    def save(self, place: Path) -> None:
        self.accelerator.save_state(str(place))

    def settle(self) -> None:
        self.accelerator.save_state.func.__self__.saves.settle(0)

    def load(self, place: Path) -> float:
        return timed(lambda: self.accelerator.load_state(str(place))).seconds


class OfTransformers(Kept):
    """Saved by `Trainer._save_checkpoint()`; loaded by what `train(resume_from_checkpoint=…)` calls for it."""

    def __init__(self, name: str, total_bytes: int, seed: int) -> None:
        super().__init__(name)
        import transformers
        from shardfast.integrations.transformers import attach

        transformers.logging.set_verbosity_error()
        torch.manual_seed(seed)
        layers = max(1, round(total_bytes / BYTES_OF_PARAMETER / (16 << 20)))  # 4 h² of attention, 12 h² behind it
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=layers,
            num_attention_heads=8, max_position_embeddings=LENGTH, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        arguments = transformers.TrainingArguments(
            "unused", max_steps=1, per_device_train_batch_size=1, save_strategy="no", logging_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip
        ids = torch.arange(LENGTH)
        rows = [{"input_ids": ids, "labels": ids}] * 16
        self.trainer = transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=rows)
        self.trainer.remove_callback(transformers.PrinterCallback)
        if self.is_ours:
            attach(self.trainer)
        self.ids = ids[None]
        self.is_trained = False
        self.loaded: Digests = {}

    def step(self) -> None:
        """Makes the first step by the trainer, which prepares its objects for it, and the others by hand."""
        if not self.is_trained:
            self.trainer.train()
            self.is_trained = True
            return
        self.trainer.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()

    def save(self, place: Path) -> None:
        self.trainer.args.output_dir = str(place)
        self.trainer._save_checkpoint(self.trainer.model, trial=None)

    def settle(self) -> None:
        self.trainer._save_checkpoint.func.__self__._saves.settle(0)

    def load(self, place: Path) -> float:
        import transformers

        trained = self

        class Look(transformers.TrainerCallback):
            """Looks at what was loaded before the first step changes it."""

            def on_train_begin(self, *args: Any, **named: Any) -> None:
                trained.loaded = trained._digests()

        spent: list[float] = []
        self.trainer.add_callback(Look())
        self.trainer.args.max_steps = 2
        if self.is_ours:
            _clocked(spent, self.trainer.train.func.__self__._resume, "find")
        _clocked(
            spent,
            self.trainer,
            "_load_from_checkpoint",
            "_load_optimizer_and_scheduler",
            "_load_scaler",
            "_load_rng_state",
        )
        self.trainer.train(resume_from_checkpoint=str(place / "checkpoint-1"))
        return sum(spent)

    def _digests(self) -> Digests:
        return _digests(self.trainer.model.named_parameters(), self.trainer.optimizer.optimizer)

    def digests(self) -> Digests:
        return self.loaded or self._digests()


class OfLightning(Kept):
    """Saved by `Trainer.save_checkpoint()`; loaded by what `fit(ckpt_path=…)` calls for it."""

    def __init__(self, name: str, form: str, total_bytes: int, seed: int) -> None:
        super().__init__(name)
        import lightning
        from lightning.pytorch.plugins.environments import TorchElasticEnvironment
        from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
        from shardfast.integrations.lightning import through
        from torch.distributed.fsdp import fully_shard

        world = dist.get_world_size()

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net(total_bytes, seed)

            def configure_model(self) -> None:
                if form == FSDP2 and not isinstance(self.net, torch.distributed.fsdp.FSDPModule):
                    fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

            def training_step(self, batch: Any, number: int) -> torch.Tensor:
                return _loss(self.net)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

        one = DDPStrategy() if form == DDP else ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
        self.trainer = lightning.Trainer(
            accelerator="cpu", devices=world, strategy=through(one) if self.is_ours else one,
            plugins=[TorchElasticEnvironment()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, max_steps=1,
        )  # fmt: skip
        self.module = Module()
        self.is_trained = False

    def _fit(self, place: Path | None = None) -> None:
        rows = torch.utils.data.DataLoader(torch.zeros(8, 1), batch_size=1)
        self.trainer.fit(self.module, rows, ckpt_path=None if place is None else str(place))
        self.model, self.optimizer, self.is_trained = self.module.net, self.trainer.optimizers[0], True

    def step(self) -> None:
        """Makes the first step by the trainer, which prepares its objects for it, and the others by hand."""
        if self.is_trained:
            super().step()
        else:
            self._fit()

    def save(self, place: Path) -> None:
        self.trainer.save_checkpoint(place / CHECKPOINT)

    def settle(self) -> None:
        from shardfast.integrations import lightning_strategy

        lightning_strategy._saves.settle(0)

    def load(self, place: Path) -> float:
        """The checkpoint's only step is the last one, so that nothing is trained behind it."""
        spent: list[float] = []
        names = ("_restore_modules_and_callbacks", "restore_training_state", "resume_end")
        _clocked(spent, self.trainer._checkpoint_connector, *names)
        self._fit(place / CHECKPOINT)
        return sum(spent)


class Counted:
    """torchtitan's `train_state`."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class OfTorchtitan(Kept):
    """Saved and loaded by torchtitan's checkpoint manager, under FSDP2; its trainer asks for a device."""

    def __init__(self, name: str, mode: str, total_bytes: int, seed: int) -> None:
        super().__init__(name)
        from shardfast.integrations.torchtitan import Shardfast
        from torch.distributed.fsdp import fully_shard
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        self.model = Net(total_bytes, seed)
        fully_shard(self.model)
        self.optimizers = default_adamw(lr=1e-3).build(model_parts=[self.model])
        (self.optimizer,) = self.optimizers.optimizers
        schedule = LRSchedulersContainer.Config(warmup_steps=2, total_steps=100)
        self.counted = Counted()
        options = {"enable": True, "interval": 1, "keep_latest_k": 0, "last_save_model_only": False}
        config = Shardfast.Config(**options) if self.is_ours else CheckpointManager.Config(**options, async_mode=mode)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.manager = config.build(
            dataloader=ParallelAwareDataloader(Rows(), dp_rank=rank, dp_world_size=world, batch_size=1),
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=schedule.build(optimizers=self.optimizers, training_steps=100),
            states={"train_state": self.counted},
            sd_adapter=None,
            base_folder="unused",
        )

    def _at(self, place: Path) -> None:
        self.manager.folder = place if self.is_ours else str(place)

    def save(self, place: Path) -> None:
        self._at(place)
        self.counted.step += 1
        self.manager.save(self.counted.step)

    def before_step(self) -> None:
        self.manager.maybe_wait_for_staging()

    def finish(self, place: Path) -> None:
        self.manager.maybe_wait_for_saving()
        if not self.is_ours:
            sync_files_of_rank(place)

    def load(self, place: Path) -> float:
        self._at(place)
        return timed(self.manager.load).seconds

    def close(self) -> None:
        self.manager.close()
        super().close()


class Rows(torch.utils.data.IterableDataset[int]):
    """A dataset with a state that torchtitan's loader asks for."""

    def __iter__(self) -> Any:
        return iter(range(8))

    def state_dict(self) -> dict[str, Any]:
        return {"replicated": None, "units": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Has no position."""


def _ways(trainer: str, total_bytes: int) -> tuple[dict[str, dict[str, Maker]], dict[str, str]]:
    """By the form of the trainer's state its ways to save and load, ours first; notes on those of the trainer."""
    if trainer == TITAN:
        modes = {OURS: "", f"{TITAN}, DCP": "disabled", f"{TITAN}, DCP async": "async"}
        modes[f"{TITAN}, DCP async, pinned"] = "async_with_pinned_mem"
        makers = {name: functools.partial(OfTorchtitan, name, mode, total_bytes) for name, mode in modes.items()}
        notes = {name: f'CheckpointManager, async_mode="{mode}"; {SYNCED}' for name, mode in modes.items() if mode}
        return {FSDP2: makers}, notes
    if trainer == TRANSFORMERS:
        makers = {name: functools.partial(OfTransformers, name, total_bytes) for name in (OURS, TRANSFORMERS)}
        return {DDP: makers}, {TRANSFORMERS: f"its files by safetensors and torch.save; {SYNCED}"}
    kind = OfAccelerate if trainer == ACCELERATE else OfLightning
    forms = {
        form: {name: functools.partial(kind, name, form, total_bytes) for name in (OURS, trainer)}
        for form in (DDP, FSDP2)
    }
    return forms, {trainer: f"{DDP}: torch.save by rank 0; {FSDP2}: sharded, by DCP; {SYNCED}"}


def worker(settings: Settings, trainer: str) -> dict[str, Any]:
    """Stalls, durable saves and loads of one trainer, by form."""
    forms, notes = _ways(trainer, settings.total_bytes)
    told: dict[str, Any] = {"failed": {}, "notes": notes, "saves": {}, "loads": {}}
    for form, makers in forms.items():
        title = f"{trainer}, {form}"
        failed: dict[str, str] = {}
        told["saves"][title] = saves_of(makers, settings, failed)
        told["failed"] |= {f"{name}, {form}": reason for name, reason in failed.items()}
        failed = {}
        waited = {name: maker for name, maker in makers.items() if "async" not in name}  # they load alike
        places = {name: settings.where / f"{trainer}-{form}-{name}".replace(" ", "") for name in waited}
        told["loads"][title], _ = loads_of(waited, places, settings, failed)
        told["failed"] |= {f"load of {name}, {form}": reason for name, reason in failed.items()}
    return told


def main() -> None:
    settings = asked(gigabytes=GIGABYTES, processes=PROCESSES)
    found: dict[str, Any] = {"failed": {}, "notes": {}, "saves": {}, "loads": {}}
    for trainer in (ACCELERATE, TRANSFORMERS, LIGHTNING, TITAN):
        began = time.perf_counter()
        of_trainer = run(worker, settings, trainer, environment=ELASTIC)
        print(f"  {trainer} done: {time.perf_counter() - began:.0f} s", flush=True)
        for what, of in of_trainer.items():
            found[what] |= of
    size, failed = settings.total_bytes, found["failed"] | NOT_MEASURED
    figures: Figures = {
        "bytes": size,
        "failed": failed,
        "saves": show_saves(found["saves"], size, stall=OURS, durable=OURS, processes=PROCESSES),
        "loads": show_loads(found["loads"], size, "as a resume of the trainer does them", PROCESSES),
    }
    print(f"  {OURS}: attached, all options as they are; its saves run in the background, until durable")
    show_notes(found["notes"], failed)
    answer(figures)


if __name__ == "__main__":
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # accelerate imports datasets
    main()
