"""Megatron-Bridge's saves and loads by Shardfast::

    register_allowed_target_prefix("shardfast.")  # of megatron.bridge.utils.instantiate_utils
    config.checkpoint.custom_manager_class = "shardfast.integrations.megatron_bridge.CheckpointManager"

``save`` and ``load`` of its ``CheckpointConfig`` may be URLs of object stores. Iterations, trackers and values are
those of :mod:`shardfast.integrations.megatron`. Directories that Megatron-Bridge wrote are loaded by Megatron-Bridge.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import shardfast as sf

from .megatron_places import Found, find
from .megatron_state import State
from .megatron_trackers import checkpoint_of, trackers, whole_parameters
from .trackers import Saves

_OF_MODEL = (
    *("num_layers", "hidden_size", "num_attention_heads", "tensor_model_parallel_size", "fp16", "bf16"),
    *("pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
)
_PARTS = ("save_optim", "save_rng", "load_optim", "load_rng")
_OF_SCHEDULER = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
_COUNTS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


class CheckpointManager:
    """Manager that Megatron-Bridge calls to save and to load, by its protocol of that name.

    Args:
        checkpoint_config: Its ``CheckpointConfig``.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        from megatron.training import checkpointing

        named = ("get_rerun_state_machine", "unwrap_model", "update_num_microbatches", "_get_checkpoint_format")
        self._megatron = SimpleNamespace(
            **{name: getattr(checkpointing, name) for name in (*named, "mpu", "tensor_parallel", "np", "print_rank_0")},
            set_checkpoint_version=lambda version: None,
            check_checkpoint_args=lambda saved: None,  # a load compares the tensors themselves
        )
        self._config = checkpoint_config
        self._trackers = trackers()
        self._saves = Saves()

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """Returns this manager, which Megatron-Bridge asks, beside files, whether there is something to load."""
        return {"local_checkpoint_manager": self}

    def find_latest(self) -> int:
        """The newest iteration in ``load``; -1 if there is none. All ranks call it."""
        found = self._find(self._config.load, self._config.ckpt_step)
        return -1 if found is None else found.iteration

    def _find(self, place: str | None, step: int | None) -> Found | None:
        found = find(place, SimpleNamespace(ckpt_step=step), self._trackers, self._megatron)
        if place is not None and found is None:
            with contextlib.suppress(sf.NotFound):
                sf.mapped(place).close()
                raise sf.Invalid(f"{place} is one iteration: give the place that it is in, and its number as ckpt_step")
        return found

    def save(self, ctx: Any, callback_manager: Any) -> None:
        """Saves an iteration; with ``async_save``, the training goes on while it becomes durable.

        Raises:
            Unsupported: For what is not understood, by name.
        """
        config, iteration = ctx.state.cfg.checkpoint, int(ctx.state.train_state.step)
        _expect_understood(ctx)
        state = State(_args(ctx.state), self._megatron, ctx.model, ctx.optimizer, ctx.opt_param_scheduler)
        saved = state.to_save(iteration, ctx.num_floating_point_operations_so_far, ctx.train_data_iterator)
        counts = ctx.state.train_state.state_dict()
        saved["training"]["train_state"] = {name: value.item() for name, value in counts.items()}
        url, tracker = checkpoint_of(config.save, iteration), self._trackers.of(config.save)
        self._megatron.print_rank_0(f"saving checkpoint at iteration {iteration:7d} to {url}")

        def conclude() -> None:
            self._megatron.print_rank_0(f"  successfully saved checkpoint from iteration {iteration:7d} to {url}")
            if callback_manager is not None:
                _fire(ctx, callback_manager)

        if config.async_save:
            with whole_parameters(ctx.model):
                save = functools.partial(sf.save_async, url, saved, step=iteration)
                self._saves.begin(save, lambda: tracker.write(str(iteration), iteration), conclude)
        else:
            with whole_parameters(ctx.model):
                sf.save(url, saved, step=iteration)
            tracker.write(str(iteration), iteration)
            dist.barrier()
            conclude()

    def load(self, ctx: Any) -> tuple[int, int]:
        """Loads the newest iteration in ``load``, or ``ckpt_step``, or ``pretrained_checkpoint`` if there is none.

        Returns:
            The iteration, and the floating-point operations until then.

        Raises:
            Unsupported: For what is not understood, by name.
        """
        config = ctx.state.cfg.checkpoint
        _expect_understood(ctx)
        self._saves.settle(0)
        args = _args(ctx.state)
        found = self._find(config.load, config.ckpt_step)
        if found is None and config.pretrained_checkpoint is not None:
            found = self._find(config.pretrained_checkpoint, None)
            args.finetune = config.finetune = True
        if found is None or found.values is None:
            return self._of_bridge(ctx)
        return self._loaded(ctx, args, found)

    def _of_bridge(self, ctx: Any) -> tuple[int, int]:
        from megatron.bridge.training.checkpointing import DefaultCheckpointManager

        loaded: tuple[int, int] = DefaultCheckpointManager(self._config).load(ctx)
        return loaded

    def _loaded(self, ctx: Any, args: Any, found: Found) -> tuple[int, int]:
        values: dict[str, Any] = dict(found.values or {})
        state = State(args, self._megatron, ctx.model, ctx.optimizer, ctx.opt_param_scheduler)
        if not args.finetune and "train_state" not in values:
            raise sf.Invalid(f"{found.url} was saved by Megatron's own loop: load it with finetune=True, or there")
        iteration, operations = state.load(found.url, values, strict=ctx.strict)
        if args.finetune:
            ctx.state.train_state.step = 0
        else:
            counts = ctx.state.train_state.state_dict()
            said = {
                name: torch.tensor(value, dtype=counts[name].dtype) for name, value in values["train_state"].items()
            }
            ctx.state.train_state.load_state_dict(said)
        self._megatron.print_rank_0(f"  successfully loaded checkpoint from {found.url} at iteration {iteration}")
        return iteration, operations

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Concludes asynchronous saves that have ended, all of them if ``blocking``; raises what failed there."""
        self._saves.settle(0 if blocking else None)


def _args(state: Any) -> Any:
    """Megatron-Bridge's configuration in the words of Megatron's arguments."""
    config, counts, checkpoint = state.cfg, state.train_state, state.cfg.checkpoint
    return SimpleNamespace(
        **{name: getattr(config.model, name, None) for name in _OF_MODEL},
        **{name: getattr(counts, name) for name in _COUNTS},
        **{f"no_{name}": not getattr(checkpoint, name) for name in _PARTS},
        **{name: getattr(getattr(config, "scheduler", None), name, False) for name in _OF_SCHEDULER},
        finetune=checkpoint.finetune,
        data_parallel_random_init=config.rng.data_parallel_random_init,
        world_size=dist.get_world_size(),
        data_parallel_size=config.data_parallel_size,
    )


def _expect_understood(ctx: Any) -> None:
    """Refuses what Megatron-Bridge would do beside, with all that is asked for in one error."""
    config = ctx.state.cfg
    data = getattr(getattr(ctx, "train_data_iterator", None), "iterable", None)
    asked = {
        "peft": getattr(config, "peft", None) is not None,
        "checkpoint.also_save_hf_checkpoint": getattr(config.checkpoint, "also_save_hf_checkpoint", False),
        "checkpoint.load_main_params_from_ckpt": getattr(config.checkpoint, "load_main_params_from_ckpt", False),
        "checkpoint.most_recent_k": getattr(config.checkpoint, "most_recent_k", -1) not in (-1, None),
        "checkpoint.non_persistent_save_interval": getattr(ctx, "non_persistent_ckpt", False),
        "dataset.dataloader_save": getattr(getattr(config, "dataset", None), "dataloader_save", None),
        "dist.use_torch_fsdp2": getattr(ctx, "skip_load_to_model_and_opt", False),
        "dist.use_decentralized_pg": getattr(getattr(config, "dist", None), "use_decentralized_pg", False),
        "model.moe_mlp_glu_interleave_size": getattr(config.model, "moe_mlp_glu_interleave_size", None) is not None,
        "an Energon loader": hasattr(data, "save_state"),
        "MegatronMIMO": getattr(ctx, "module_name", None) is not None,
    }
    found = [name for name, is_asked in asked.items() if is_asked]
    if found:
        raise sf.Unsupported(
            f"Megatron-Bridge with shardfast: {', '.join(found)} is not understood: leave it out, or train without "
            "custom_manager_class"
        )


def _fire(ctx: Any, callback_manager: Any) -> None:
    from megatron.bridge.training.callbacks import CallbackContext, should_fire

    if should_fire(callback_manager, "on_checkpoint_save"):
        given = {"state": ctx.state, "model": ctx.model, "optimizer": ctx.optimizer}
        context = CallbackContext(**given, user_state=callback_manager.user_state)
        callback_manager.fire("on_checkpoint_save", context)
