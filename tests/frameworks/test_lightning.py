"""Lightning's ``Trainer`` with ``through(strategy)``: what was saved goes on bit for bit."""

import logging
import math
import os
import signal
import threading
import time
from pathlib import Path

import lightning
import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from quiet_saves import without_collectives
from shardfast.data import DistributedSampler
from shardfast.integrations.lightning import through
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

WIDTH, ROWS = 8, 48
FULL = StateDictOptions(full_state_dict=True, cpu_offload=False)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number)), number


class Stream(torch.utils.data.IterableDataset):
    """Rows of a rank, without a length; its units are rows that are left."""

    def __init__(self, rank, world):
        self.left = list(range(rank, ROWS, world))

    def __iter__(self):
        while self.left:
            number = self.left.pop(0)
            yield torch.randn(WIDTH, generator=torch.Generator().manual_seed(number)), number

    def state_dict(self):
        return {"replicated": None, "units": [{"id": number} for number in self.left]}

    def load_state_dict(self, state):
        self.left = [unit["id"] for unit in state["units"]]


def nothing_else(*args, **named):
    raise AssertionError("a file or a gathering of Lightning's")


class Net(lightning.LightningModule):
    def __init__(self, seed=0, shards=False, rate=1e-2):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 3))
        self.losses, self.read, self.extra = [], [], {"note": "mine", "tensor": torch.arange(3)}

    def configure_model(self):
        if self.hparams.shards and not isinstance(self.net, torch.distributed.fsdp.FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, number):
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        self.read += batch[1].tolist()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, number):
        self.log("val", self.net(batch[0]).square().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, number):
        return self.net(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["extra"] = self.extra

    def on_load_checkpoint(self, checkpoint):
        self.extra = checkpoint["extra"]


class Fsdp1(FSDPStrategy):
    """The strategy itself is refused on a CPU, a subclass is not; FSDP1 must hear that it is one."""

    def _setup_model(self, model):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


class Stop(Callback):
    """Kills this process once the save of a step was begun, or has the training end there."""

    def __init__(self, step, kills):
        self.step, self.kills, self.seen = step, kills, []

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            if self.kills:
                last, deadline = Path(trainer.default_root_dir) / "kept" / "last.ckpt", time.monotonic() + 60
                while not last.exists() and time.monotonic() < deadline:  # there once an earlier one is durable
                    time.sleep(0.01)
                trainer.save_checkpoint(f"{trainer.default_root_dir}/kept/killed.ckpt")
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.should_stop = True

    def state_dict(self):
        return {"seen": self.seen, "step": self.step}

    def load_state_dict(self, state):
        self.seen = [*state["seen"], state["step"]]


STRATEGIES = {
    "ddp": DDPStrategy,
    "fsdp": lambda: Fsdp1(sharding_strategy="FULL_SHARD"),
    "parallel": lambda: ModelParallelStrategy(tensor_parallel_size=1, data_parallel_size=dist.get_world_size()),
    "single": lambda: SingleDeviceStrategy("cpu"),
}


def prepare(rank, world):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0"}


def trainer(place, kind, *callbacks, strategy=None, **options):
    world = dist.get_world_size() if dist.is_initialized() else 1
    options = {"max_epochs": 3, "limit_val_batches": 0, **options}
    return lightning.Trainer(
        accelerator="cpu",
        devices=world if kind != "single" else 1,
        strategy=strategy or through(STRATEGIES[kind]()),
        plugins=[TorchElasticEnvironment()] if kind != "single" else [],
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
        **options,
    )


def saver(place, **options):
    options = {"every_n_train_steps": 2, "save_top_k": -1, "save_last": True, **options}
    return ModelCheckpoint(f"{place}/kept", **options)


def loader(**options):
    return StatefulDataLoader(Rows(), batch_size=4, **options)


def whole(one):
    """Model and optimizer as PyTorch gathers them."""
    model = one.strategy.model
    if isinstance(model, torch.distributed.fsdp.FullyShardedDataParallel):
        from layouts import whole_of_fsdp1

        return {name: value.clone() for name, value in whole_of_fsdp1(model, one.optimizers[0]).items()}
    tensors = {f"model/{name}": value for name, value in get_model_state_dict(model, options=FULL).items()}
    state = get_optimizer_state_dict(model, one.optimizers[0], options=FULL)["state"]
    tensors |= {f"optimizer/state.{name}.{part}": value for name, of in state.items() for part, value in of.items()}
    return {name.replace("module.", ""): value.detach().clone() for name, value in tensors.items()}


def fit(rank, world, place, kind, until, kills, resume, options=None, loaders=None):
    """The losses, and what the training held at its end."""
    prepare(rank, world)
    originals = torch.save, FullyShardedDataParallel.optim_state_dict
    torch.save = FullyShardedDataParallel.optim_state_dict = nothing_else
    lightning.seed_everything(1 + rank, verbose=False)
    module = Net(9 if resume else 0, shards=kind == "parallel")
    stop = Stop(until, kills)
    one = trainer(place, kind, stop, saver(place), **(options or {}))
    one.fit(module, loader(**(loaders or {})), ckpt_path=resume)
    torch.save, FullyShardedDataParallel.optim_state_dict = originals
    rates = [group["lr"] for group in one.optimizers[0].param_groups]
    return module.losses, module.read, rates, one.global_step, stop.seen, whole(one)


def differing(one, other):
    return [name for name in one.keys() | other.keys() if not torch.equal(one[name], other[name])]


def saves_alone(rank, world, place, kind):
    prepare(rank, world)
    urls = without_collectives()
    one = trainer(place, kind, saver(place), max_epochs=1)
    one.fit(Net(0, shards=kind == "parallel"), loader())
    return len(urls)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "parallel"])
def test_saves_run_no_collective(ranks, tmp_path, kind):
    first, second = ranks(2)(saves_alone, str(tmp_path), kind)
    assert first == second > 1


def goes_on(ranks, place, kind, step):
    straight = ranks(2)(fit, str(place / "whole"), kind, 99, False, None)
    with pytest.raises(AssertionError, match="died without a word"):
        ranks(2)(fit, str(place / "run"), kind, step, True, None)
    resumed = ranks(2)(fit, str(place / "run"), kind, 99, False, "last")
    for expected, found in zip(straight, resumed, strict=True):
        count = len(found[0])
        assert 0 < count < len(expected[0])
        assert found[0] == expected[0][-count:]
        assert found[1] == expected[1][-4 * count :]
        assert found[2:4] == expected[2:4]
        assert found[4] == [step]
        assert differing(found[5], expected[5]) == []


@pytest.mark.smoke
def test_it_goes_on_after_a_kill_in_a_save(ranks, tmp_path):
    goes_on(ranks, tmp_path, "ddp", 4)


@pytest.mark.parametrize(("kind", "step"), [("ddp", 6), ("ddp", 8), ("ddp", 10), ("fsdp", 8), ("parallel", 8)])
def test_each_strategy_goes_on_after_a_kill(ranks, tmp_path, kind, step):
    goes_on(ranks, tmp_path, kind, step)


# Other numbers of ranks


class Held(Callback):
    """What the training holds when it starts."""

    def on_train_start(self, trainer, module):
        self.held = whole(trainer)


class Save(Callback):
    """Saves at a step, and has the training end."""

    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            self.held = whole(trainer)
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def elsewhere(rank, world, place, kind, until, resume, stream=False):
    prepare(rank, world)
    module, held = Net(9 if resume else 0, shards=kind == "parallel"), Held()
    if not resume:
        held = Save(f"{place}/one.ckpt", until)
    one = trainer(place, kind, held, use_distributed_sampler=False, max_epochs=1)
    if stream:
        data = StatefulDataLoader(Stream(rank, world), batch_size=1)
    else:
        data = loader(sampler=DistributedSampler(Rows()))
    one.fit(module, data, ckpt_path=resume)
    dist.barrier()  # ranks that end sooner close what others still ask
    return module.losses, module.read, held.held


@pytest.mark.parametrize(("kind", "other"), [("ddp", "parallel"), ("fsdp", "ddp"), ("parallel", "fsdp")])
def test_another_number_of_ranks_and_another_strategy_go_on(ranks, tmp_path, kind, other):
    first = ranks(2)(elsewhere, str(tmp_path), kind, 4, None)
    assert all(differing(first[0][2], rank[2]) == [] for rank in first)
    read = [number for rank in first for number in rank[1]]
    assert len(set(read)) == len(read) == 32
    for world in (1, 4):
        found = ranks(world)(elsewhere, str(tmp_path), other, 99, str(tmp_path / "one.ckpt"))
        for losses, _, held in found:
            assert differing(held, first[0][2]) == []
            assert losses
            assert all(math.isfinite(loss) for loss in losses)
        rest = [number for rank in found for number in rank[1]]
        assert sorted(read + rest) == list(range(ROWS))


@pytest.mark.parametrize("world", [1, 2])
def test_batches_that_lightning_has_read_ahead_are_not_lost(ranks, tmp_path, world):
    first = ranks(2)(elsewhere, str(tmp_path), "ddp", 7, None, True)
    then = ranks(world)(elsewhere, str(tmp_path), "ddp", 99, str(tmp_path / "one.ckpt"), True)
    assert sorted(number for rank in (*first, *then) for number in rank[1]) == list(range(ROWS))
    assert all(len(rank[1]) == 7 for rank in first)


def opaque(rank, world, place, resume):
    prepare(rank, world)
    one = trainer(place, "ddp", Save(f"{place}/one.ckpt", 2))
    if not resume:
        one.fit(Net(), loader())
        return None
    with pytest.raises(sf.Invalid) as error:
        one.fit(Net(), loader(), ckpt_path=resume)
    return str(error.value)


def test_a_position_that_does_not_fit_is_refused(ranks, tmp_path):
    ranks(2)(opaque, str(tmp_path), None)
    (text,) = ranks(1)(opaque, str(tmp_path), str(tmp_path / "one.ckpt"))
    assert "dataloader/0 was saved in 2 pieces" in text


@pytest.mark.parametrize("workers", [0, 1])
def test_a_save_after_the_training_has_its_position(tmp_path, workers):
    def of(steps, resume=None):
        module = Net(9 if resume else 0)
        data = loader(shuffle=True, num_workers=workers)
        return run(tmp_path, module=module, data=data, resume=resume, max_steps=steps, max_epochs=-1), module

    _, straight = of(9)
    one, module = of(5)
    one.save_checkpoint(tmp_path / "one.ckpt")
    one.save_checkpoint(tmp_path / "two.ckpt")
    _, resumed = of(9, str(tmp_path / "two.ckpt"))
    assert module.read + resumed.read == straight.read
    assert module.losses + resumed.losses == straight.losses
    again = Net(0)
    one.fit(again, loader(), ckpt_path=None)


# What Lightning wrote


def old(rank, world, place, resume):
    prepare(rank, world)
    strategy = ModelParallelStrategy(tensor_parallel_size=1, data_parallel_size=2)
    module, held = Net(9 if resume else 0, shards=True), Held()
    one = trainer(place, "parallel", Stop(3, False), held, strategy=through(strategy) if resume else strategy)
    one.fit(module, loader(), ckpt_path=resume)
    if not resume:
        one.save_checkpoint(f"{place}/old.ckpt")
    return whole(one) if not resume else held.held


def test_a_directory_of_lightning_is_loaded_by_lightning(ranks, tmp_path):
    first = ranks(2)(old, str(tmp_path), None)
    assert (tmp_path / "old.ckpt" / ".metadata").exists()
    then = ranks(2)(old, str(tmp_path), str(tmp_path / "old.ckpt"))
    assert differing(first[0], then[0]) == []


def run(place, *callbacks, module=None, strategy=None, resume=None, data=None, **options):
    lightning.seed_everything(1, verbose=False)
    one = trainer(place, "single", *callbacks, strategy=strategy, **options)
    module = module if module is not None else Net(5 if resume else 0)
    one.fit(module, data if data is not None else loader(), ckpt_path=resume)
    return one


def test_a_file_of_lightning_is_loaded_by_lightning(tmp_path):
    one = run(tmp_path, Stop(3, False), strategy=SingleDeviceStrategy("cpu"))
    one.save_checkpoint(tmp_path / "old.ckpt")
    held = Held()
    run(tmp_path, held, resume=str(tmp_path / "old.ckpt"), max_epochs=2)
    assert differing(held.held, whole(one)) == []


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_a_module_of_another_precision_goes_on_bit_for_bit(tmp_path, precision):
    whole_run = run(tmp_path, precision=precision, max_epochs=2)
    run(tmp_path, precision=precision, max_epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    again = run(tmp_path, resume=str(tmp_path / "one.ckpt"), precision=precision, max_epochs=2)
    expected = whole_run.lightning_module.losses
    assert again.lightning_module.losses == expected[12:]
    assert differing(whole(again), whole(whole_run)) == []


# Options of Lightning's


def names(place):
    return sorted(path.name for path in Path(place).iterdir())


def test_the_best_are_kept_and_found(tmp_path):
    keeper = saver(tmp_path, monitor="loss", save_top_k=2, filename="best")
    module = Net()
    one = run(tmp_path, keeper, module=module)
    assert names(tmp_path / "kept") == sorted([*(Path(path).name for path in keeper.best_k_models), "last.ckpt"])
    assert len(keeper.best_k_models) == 2
    for path in (*keeper.best_k_models, keeper.last_model_path):
        assert (Path(path) / "shardfast" / "COMMIT").exists()
    best = Net(7)
    assert one.test(best, loader(), ckpt_path="best", verbose=False)
    with sf.mapped(Path(keeper.best_model_path) / "shardfast") as checkpoint:
        assert torch.equal(best.net[0].weight, torch.as_tensor(checkpoint["model/net.0.weight"]))
        assert checkpoint.value("lightning/global_step") != one.global_step
    one.validate(best, loader(), ckpt_path="last", verbose=False)
    assert torch.equal(best.net[0].weight, module.net[0].weight)
    one.predict(best, loader(), ckpt_path=keeper.best_model_path)
    again = saver(tmp_path, monitor="loss", save_top_k=2, filename="best")
    run(tmp_path, again, resume="last", max_epochs=4)
    assert again.best_model_score <= keeper.best_model_score
    assert len(again.best_k_models) == 2


def test_names_are_counted_up_while_saves_are_in_flight(tmp_path):
    keeper = saver(tmp_path, monitor="loss", save_top_k=-1, filename="same", save_last=False)
    run(tmp_path, keeper, max_epochs=1)
    assert names(tmp_path / "kept") == sorted(["same.ckpt", *(f"same-v{number}.ckpt" for number in range(1, 6))])


def test_a_name_without_versions_is_replaced(tmp_path):
    keeper = saver(tmp_path, save_top_k=1, filename="same", save_last=False, enable_version_counter=False)
    run(tmp_path, keeper, max_epochs=2)
    assert names(tmp_path / "kept") == ["same.ckpt"]
    with sf.mapped(tmp_path / "kept" / "same.ckpt" / "shardfast") as checkpoint:
        assert checkpoint.value("lightning/global_step") == 24


def test_weights_alone(tmp_path):
    one = run(tmp_path, saver(tmp_path, save_weights_only=True, save_top_k=1, save_last=False), max_epochs=1)
    (path,) = (tmp_path / "kept").iterdir()
    with sf.mapped(path / "shardfast") as checkpoint:
        assert all(name.startswith("model/") for name in checkpoint)
        assert not any(name.startswith(("random", "dataloader")) for name in checkpoint.value_names())
    one.test(Net(3), loader(), ckpt_path=str(path), verbose=False)
    with pytest.raises(KeyError, match="contains only the model"):
        run(tmp_path, resume=str(path))


def test_a_link_to_what_is_not_durable_is_passed_over(tmp_path, caplog):
    keeper = saver(tmp_path, save_last="link")
    run(tmp_path, keeper)
    assert (tmp_path / "kept" / "last.ckpt").is_symlink()
    target = (tmp_path / "kept" / "last.ckpt").resolve()
    (target / "shardfast" / "COMMIT").unlink()
    with caplog.at_level(logging.WARNING, logger="shardfast"):
        one = run(tmp_path, saver(tmp_path, save_last="link"), resume="last", max_epochs=3)
    assert "was not saved to its end" in caplog.text
    assert one.global_step == 36
    assert (tmp_path / "kept" / "last.ckpt" / "shardfast" / "COMMIT").exists()


def test_what_is_half_written_is_refused_by_name(tmp_path):
    run(tmp_path, saver(tmp_path, save_last=False), max_epochs=1)
    *_, before, newest = sorted((tmp_path / "kept").iterdir(), key=lambda path: int(path.stem.rpartition("=")[2]))
    (newest / "shardfast" / "COMMIT").unlink()
    with pytest.raises(sf.NotFound, match=f"{newest} was not saved to its end; the newest that was is {before}"):
        run(tmp_path, resume=str(newest))


def test_several_optimizers_by_hand(tmp_path):
    class Two(Net):
        def __init__(self, seed):
            super().__init__(seed)
            self.automatic_optimization = False

        def training_step(self, batch, number):
            loss = super().training_step(batch, number)
            self.manual_backward(loss)
            for one in self.optimizers():
                one.step()
                one.zero_grad()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.net[0].parameters(), 0.1, 0.9), torch.optim.AdamW(self.net[3].parameters())]

    first, then = Two(0), Two(1)
    straight = Two(0)
    run(tmp_path / "whole", module=straight, max_epochs=2)
    one = run(tmp_path, module=first, max_epochs=1)
    one.save_checkpoint(tmp_path / "one.ckpt")
    other = run(tmp_path, module=then, resume=str(tmp_path / "one.ckpt"), max_epochs=2)
    assert len(other.optimizers) == 2
    assert then.losses == straight.losses[12:]
    with pytest.raises(sf.Invalid, match="2 optimizers, the module configures 1: expected as many"):
        run(tmp_path, resume=str(tmp_path / "one.ckpt"))


def test_a_module_that_is_not_strict(tmp_path):
    one = run(tmp_path, max_epochs=1)
    one.save_checkpoint(tmp_path / "one.ckpt", weights_only=True)
    more = Net(2)
    more.more = nn.Linear(2, 2)
    with pytest.raises(sf.Invalid, match="model/more"):
        one.test(more, loader(), ckpt_path=str(tmp_path / "one.ckpt"), verbose=False)
    more.strict_loading = False
    one.test(more, loader(), ckpt_path=str(tmp_path / "one.ckpt"), verbose=False)
    assert torch.equal(more.net[0].weight, one.lightning_module.net[0].weight) or more is one.lightning_module


# Saves that fail, and removals


def test_a_failed_save_is_raised_by_the_next_one_or_the_end(tmp_path, held):
    one = run(tmp_path, max_epochs=1)
    held.fails = True
    one.save_checkpoint(tmp_path / "a.ckpt")
    held.fails = False
    with pytest.raises(sf.Unavailable, match="the disk is gone"):
        one.save_checkpoint(tmp_path / "b.ckpt")
        one.save_checkpoint(tmp_path / "c.ckpt")
    run(tmp_path, resume=str(tmp_path / "b.ckpt"), max_epochs=2)
    held.fails = True
    with pytest.raises(sf.Unavailable, match="the disk is gone"):
        run(tmp_path, saver(tmp_path, every_n_train_steps=12, save_last=False), max_epochs=1)


def test_the_old_one_is_removed_when_the_new_one_is_durable(tmp_path, held):
    one = run(tmp_path, max_epochs=1)
    a, b, c = (tmp_path / f"{name}.ckpt" for name in "abc")
    one.save_checkpoint(a)
    held.waits = threading.Event()
    one.save_checkpoint(b)
    one.strategy.remove_checkpoint(a)
    one.strategy.remove_checkpoint(b)  # it is in flight
    time.sleep(0.3)
    assert (a / "shardfast" / "COMMIT").exists()
    held.waits.set()
    one.strategy.on_train_end()
    assert not a.exists()
    assert not b.exists()
    held.waits, held.fails = None, False
    one.save_checkpoint(a)
    one.strategy.on_train_end()
    held.fails = True
    one.save_checkpoint(b)
    one.strategy.remove_checkpoint(a)
    with pytest.raises(sf.Unavailable):
        one.strategy.on_train_end()
    assert (a / "shardfast" / "COMMIT").exists()  # the newer one failed
    held.fails = False
    one.save_checkpoint(c)
    one.strategy.on_train_end()
    assert not a.exists()


def test_a_place_that_is_saved_to_again_is_not_removed(tmp_path, held):
    one = run(tmp_path, max_epochs=1)
    a, b = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    one.save_checkpoint(a)
    one.strategy.on_train_end()
    held.waits = threading.Event()
    one.save_checkpoint(b)
    one.strategy.remove_checkpoint(a)
    one.save_checkpoint(a)
    held.waits.set()
    one.strategy.on_train_end()
    assert (a / "shardfast" / "COMMIT").exists()
    assert names(tmp_path) == ["a.ckpt", "b.ckpt", "checkpoints"]


def test_the_old_one_of_a_name_stays_until_the_new_one_is_durable(tmp_path, held):
    one = run(tmp_path, max_epochs=1)
    a = tmp_path / "a.ckpt"
    one.save_checkpoint(a)
    one.strategy.on_train_end()

    def step():
        with sf.mapped(a / "shardfast") as checkpoint:
            return checkpoint.value("lightning/extra")["note"]

    held.waits = threading.Event()
    for note in ("second", "third"):
        one.lightning_module.extra["note"] = note
        if note == "third":
            held.waits.set()
        one.save_checkpoint(a)
        if note == "second":
            assert step() == "mine"
    one.strategy.on_train_end()
    assert step() == "third"
    a.rename(tmp_path / ".a.ckpt.saving")  # as a process leaves it that dies between two renames
    run(tmp_path, resume=str(a), max_epochs=2)
    assert a.exists()


def test_saves_that_are_not_asynchronous(tmp_path):
    strategy = through(SingleDeviceStrategy("cpu"), is_async=False)
    one = run(tmp_path, strategy=strategy, max_epochs=1)
    one.save_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt" / "shardfast" / "COMMIT").exists()


# What is refused


def test_what_is_no_data_is_refused_with_its_place(tmp_path):
    one = run(tmp_path, max_epochs=1)
    one.lightning_module.extra = {"hook": print}
    with pytest.raises(sf.Invalid, match=r"lightning\.extra"):
        one.save_checkpoint(tmp_path / "a.ckpt")
    one.lightning_module.extra = {}
    one.save_checkpoint(tmp_path / "a.ckpt")
    one.strategy.on_train_end()
    assert (tmp_path / "a.ckpt" / "shardfast" / "COMMIT").exists()


def test_hyperparameters_and_hooks_data_come_back(tmp_path):
    one = run(tmp_path, max_epochs=1)
    one.lightning_module.extra = {"a/b": {3: (1, 2)}, "tensor": torch.arange(5.0)}
    one.save_checkpoint(tmp_path / "a.ckpt")
    again = Net(4)
    run(tmp_path, module=again, resume=str(tmp_path / "a.ckpt"), max_epochs=2)
    assert again.extra["a/b"] == {3: (1, 2)}
    assert torch.equal(again.extra["tensor"], torch.arange(5.0))
    with sf.mapped(tmp_path / "a.ckpt" / "shardfast") as checkpoint:
        assert checkpoint.value("lightning/hyper_parameters") == {"seed": 0, "shards": False, "rate": 1e-2}


def test_tensors_of_hooks_in_place_of_the_weights_are_refused(tmp_path):
    one = run(tmp_path, max_epochs=1)

    class Reads(Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            checkpoint["state_dict"].pop("net.0.weight")

    class Replaces(Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            checkpoint["state_dict"] = {}

    for callback in (Reads(), Replaces()):
        one.callbacks.append(callback)
        with pytest.raises(sf.Unsupported, match=r"checkpoint\['state_dict'\]: a hook or a callback"):
            one.save_checkpoint(tmp_path / "a.ckpt")
        one.callbacks.pop()
    assert not (tmp_path / "a.ckpt").exists()


def test_options_that_are_not_understood_are_refused(tmp_path):
    one = run(tmp_path, max_epochs=1)
    with pytest.raises(sf.Unsupported, match="storage_options"):
        one.save_checkpoint(tmp_path / "a.ckpt", storage_options={"a": 1})
    with pytest.raises(sf.Unsupported, match=r"s3://bucket/a\.ckpt: expected a directory"):
        one.save_checkpoint("s3://bucket/a.ckpt")
    one.strategy.checkpoint_io = AsyncCheckpointIO()
    with pytest.raises(sf.Unsupported, match="AsyncCheckpointIO"):
        one.save_checkpoint(tmp_path / "a.ckpt")


def test_through_is_called_once_before_the_trainer(tmp_path, monkeypatch, caplog):
    strategy = through(SingleDeviceStrategy("cpu"))
    with pytest.raises(sf.Invalid, match="call it once"):
        through(strategy)
    used = SingleDeviceStrategy("cpu")
    run(tmp_path, strategy=used, max_epochs=1)
    with pytest.raises(sf.Invalid, match="a trainer has begun with it"):
        through(used)
    for other in (DeepSpeedStrategy(), "ddp_spawn", object()):
        with pytest.raises(sf.Unsupported):
            through(other)
    assert isinstance(through("ddp"), DDPStrategy)
    monkeypatch.setattr(lightning, "__version__", "2.7.0")
    with caplog.at_level(logging.WARNING, logger="shardfast"):
        through(SingleDeviceStrategy("cpu"))
    assert "lightning 2.7.0: shardfast was tried with 2.6.6" in caplog.text
