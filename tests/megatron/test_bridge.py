"""Megatron-Bridge's checkpoint manager, called by doubles of what its 0.6.2 gives: it does not import on a CPU."""

import dataclasses
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import shardfast as sf
import torch

pytest.importorskip(
    "megatron.training",
    reason="megatron.training cannot be imported: megatron-core has it from 0.17 on, before 0.19 with more packages",
)

import loops
from shardfast.integrations.megatron_bridge import CheckpointManager


@dataclasses.dataclass
class TrainState:
    """As in megatron.bridge.training.state."""

    step: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    floating_point_operations_so_far: float = 0
    do_train: bool = False

    def state_dict(self):
        kinds = {int: torch.int64, float: torch.float64, bool: torch.bool}
        return {
            field.name: torch.tensor(getattr(self, field.name), dtype=kinds[field.type])
            for field in dataclasses.fields(self)
        }

    def load_state_dict(self, state):
        for name, value in state.items():
            setattr(self, name, value.item())


class Bridge:
    """What `setup()` and `train()` of Megatron-Bridge hold, of the objects of a training."""

    def __init__(self, training, place, **checkpoint):
        args = training.args
        said = {"save_optim": True, "save_rng": True, "load_optim": True, "load_rng": True, "ckpt_step": None}
        said |= {"save": place, "load": place, "finetune": False, "async_save": False, "pretrained_checkpoint": None}
        self.checkpoint = SimpleNamespace(**{**said, **checkpoint})
        self.cfg = SimpleNamespace(
            model=args,
            checkpoint=self.checkpoint,
            rng=SimpleNamespace(data_parallel_random_init=False),
            data_parallel_size=args.data_parallel_size,
            peft=None,
        )
        self.train_state, self.training = TrainState(), training
        self.manager = CheckpointManager(self.checkpoint)

    def context(self, **more):
        own = self.training
        objects = {"model": own.model, "optimizer": own.optimizer, "opt_param_scheduler": own.scheduler}
        return SimpleNamespace(state=self, strict=True, **objects, **more)

    def step(self, number):
        self.training.step(number)
        self.train_state.step = number
        self.train_state.consumed_train_samples += 4
        self.train_state.do_train = True

    def save(self, callbacks=None):
        more = {"num_floating_point_operations_so_far": 1000 * self.train_state.step, "train_data_iterator": None}
        self.manager.save(self.context(**more), callbacks)

    def seen(self):
        """All that a resume has to bring back."""
        own = self.training
        return [*own.weights(), *own.optimizer_state()], loops.tracker_states(), self.train_state


class Callbacks:
    user_state = None

    def __init__(self):
        self.fired = []

    def fire(self, name, context):
        self.fired.append((name, context["state"].train_state.step))


def doubles():
    """The modules of Megatron-Bridge that the manager asks for."""
    callbacks, checkpointing = ModuleType("callbacks"), ModuleType("checkpointing")
    callbacks.CallbackContext, callbacks.should_fire = dict, lambda manager, name: True
    checkpointing.DefaultCheckpointManager = lambda config: SimpleNamespace(load=lambda ctx: ("of Bridge", config.load))
    for name, module in {"callbacks": callbacks, "checkpointing": checkpointing}.items():
        sys.modules[f"megatron.bridge.training.{name}"] = module
    for name in ("megatron.bridge", "megatron.bridge.training"):
        sys.modules[name] = ModuleType(name)


def resume(training, place, is_async):
    doubles()
    bridge, callbacks = Bridge(training, place, async_save=is_async), Callbacks()
    assert bridge.manager.find_latest() == -1
    assert bridge.manager.load(bridge.context()) == ("of Bridge", place)
    for number in (1, 2):
        bridge.step(number)
        bridge.save(callbacks)
    saved, states = bridge.seen()[0], bridge.seen()[1:]
    counts, drawn = dataclasses.replace(states[1]), loops.draws()
    bridge.step(3)
    bridge.manager.finalize_async_saves(bridge, blocking=True, terminate=True)
    assert [name for name, _ in callbacks.fired] == ["on_checkpoint_save"] * 2
    again = Bridge(training, place)
    assert again.manager.checkpointing_context["local_checkpoint_manager"].find_latest() == 2
    assert again.manager.load(again.context()) == (2, 2000)
    assert loops.same(again.seen()[0], saved)
    assert (again.seen()[1], again.train_state) == (states[0], counts)
    assert loops.draws() == drawn
    earlier = Bridge(training, place, ckpt_step=1)
    assert earlier.manager.load(earlier.context()) == (1, 1000)
    tuned = Bridge(training, f"{place}/elsewhere", pretrained_checkpoint=place)
    assert tuned.manager.load(tuned.context()) == (0, 2000)
    assert tuned.checkpoint.finetune
    assert not tuned.train_state.step
    inside = Bridge(training, f"{place}/iter_0000002")
    return training.error_of(inside.manager.find_latest)


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_a_training_of_megatron_bridge_is_saved_and_resumed(ranks, tmp_path, is_async):
    arguments = ["--tensor-model-parallel-size", "2", "--save", str(tmp_path), "--save-interval", "100"]
    for refused in ranks(2)(loops.call, Resume(str(tmp_path / "run"), is_async), arguments):
        assert "iter_0000002 is one iteration: give the place that it is in" in refused


@dataclasses.dataclass
class Resume:
    place: str
    is_async: bool

    def __call__(self, training):
        return resume(training, self.place, self.is_async)


def refused(training):
    bridge = Bridge(training, "/nowhere", most_recent_k=3)
    bridge.cfg.peft = object()
    return [
        training.error_of(bridge.save),
        training.error_of(bridge.manager.load, bridge.context(module_name="vision")),
    ]


def test_what_megatron_bridge_would_do_beside_is_refused_by_name(ranks, tmp_path):
    for save, load in ranks(1)(loops.call, refused, ["--save", str(tmp_path), "--save-interval", "100"]):
        assert "peft, checkpoint.most_recent_k is not understood" in save
        assert "peft, checkpoint.most_recent_k, MegatronMIMO is not understood" in load


def test_the_manager_has_the_protocol_of_megatron_bridge():
    parameters = {
        "__init__": ["self", "checkpoint_config"],
        "save": ["self", "ctx", "callback_manager"],
        "load": ["self", "ctx"],
        "finalize_async_saves": ["self", "state", "blocking", "terminate"],
    }
    for name, expected in parameters.items():
        assert list(inspect.signature(getattr(CheckpointManager, name)).parameters) == expected
    assert issubclass(sf.Unsupported, sf.Error)
