"""Values that an iteration of Megatron's loop saves beside model and optimizer, and what a load does with it.

- ``training/…`` are values of the job: arguments, consumed samples, the learning-rate schedule, the iteration.
- ``random/tp0-pp1-ep0-etp0`` are the random generators at a place of the layout; with ``--data-parallel-random-init``
  also by data-parallel rank.
- ``rerun/own`` is each rank's part of the rerun state machine.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

import shardfast as sf

from .megatron_groups import Asked

_VERSION = 3.0
"""Megatron's version of what is in a checkpoint; 3.0 since 2020."""

_COMPARED = (
    *("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding", "max_position_embeddings"),
    *("make_vocab_size_divisible_by", "padded_vocab_size", "tokenizer_type", "data_parallel_random_init"),
    *("global_batch_size", "no_save_optim", "no_save_rng"),
)
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_EXPERT_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
_JOB_SIZES = ("world_size", "data_parallel_size")
_CONSUMED = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_SAVED = (*_COMPARED, *_SIZES, *_EXPERT_SIZES, *_JOB_SIZES, *_CONSUMED)


def progress(args: Any, scheduler: Any) -> tuple[Any, ...]:
    """How far a training is: what every step changes."""
    return args.consumed_train_samples, getattr(scheduler, "num_steps", None)


class State:
    """The state of a training, as the loop hands it over.

    Args:
        args, megatron: Megatron's arguments, and ``megatron.training.checkpointing``.
        model, optimizer, scheduler: This rank's chunks; the optimizer and its ``OptimizerParamScheduler``, or ``None``.
    """

    def __init__(self, args: Any, megatron: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        self._args = args
        self._megatron = megatron
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        for chunk in megatron.unwrap_model(model):
            if hasattr(chunk, "_modelopt_state"):
                raise sf.Unsupported("a model that ModelOpt has converted: train it without attach()")

    def is_rerun_pending(self) -> bool:
        """Whether the rerun state machine wants this step to be repeated by another job."""
        machine = self._megatron.get_rerun_state_machine()
        return bool(machine.validate_state_dict({"state": machine.state}))

    def to_save(self, iteration: int, operations: float, iterator: Any) -> dict[str, Any]:
        """The state of this rank for a save.

        Args:
            iteration: The number of steps done.
            operations: Floating-point operations so far.
            iterator: What gives the training's data.
        """
        args = self._args
        training: dict[str, Any] = {
            "iteration": iteration,
            "args": {name: getattr(args, name, None) for name in _SAVED},
            "num_floating_point_operations_so_far": operations,
        }
        state: dict[str, Any] = {"model": self._model, "training": training}
        if not args.no_save_optim:
            if self._optimizer is not None:
                state["optimizer"] = self._optimizer
            if self._scheduler is not None:
                training["scheduler"] = self._scheduler.state_dict()
        if not args.no_save_rng:
            state["random"] = {self._place(): self._random()}
        rerun = self._megatron.get_rerun_state_machine().state_dict(data_iterator=iterator, ckpt_format="torch_dist")
        if rerun is not None:
            state["rerun"] = {"own": sf.PerRank(rerun.pop("sharded").data)}
            training["rerun"] = rerun
        return state

    def load(self, url: str, values: dict[str, Any], *, strict: bool) -> tuple[int, Any]:
        """Loads a checkpoint as Megatron's arguments say.

        Args:
            url: The checkpoint.
            values: Its values ``training/…``.
            strict: As in :func:`shardfast.load`.

        Returns:
            The iteration, and the floating-point operations until then.

        Raises:
            Invalid: The checkpoint has no optimizer, or another model or schedule; as :func:`shardfast.load`.
        """
        args, megatron, saved = self._args, self._megatron, SimpleNamespace(**values["args"])
        megatron.set_checkpoint_version(_VERSION)
        state: dict[str, Any] = {"model": self._model}
        if not args.finetune:
            megatron.check_checkpoint_args(saved)
            self._add_random(state, saved)
            self._add_rerun(state, saved, values.get("rerun"))
        has_optimizer = not args.finetune and not args.no_load_optim
        if has_optimizer and saved.no_save_optim:
            raise sf.Invalid(f"{url} was saved with --no-save-optim: pass --no-load-optim or --finetune to load it")
        if has_optimizer and self._optimizer is not None:
            state["optimizer"] = self._optimizer
        asked = Asked(self._args, state.get("optimizer"))
        sf.load(url, state, only=list(state), strict=strict)
        asked.settle(url)
        if not has_optimizer:
            if (args.fp16 or args.bf16) and self._optimizer is not None:
                self._optimizer.reload_model_params()
        elif self._scheduler is not None:
            self._scheduler.num_steps = 0  # to which its method adds
            self._scheduler.load_state_dict(values["scheduler"])
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            group.setdefault("default_config", True)
        if "rerun" in state:
            rerun = {**values["rerun"], "sharded": state["rerun"]["own"].value}
            megatron.get_rerun_state_machine().load_state_dict(rerun)
        if "random" in state:
            self._set_random(state["random"][self._place()])
        torch.cuda.empty_cache()
        operations = values["num_floating_point_operations_so_far"]
        if args.finetune:
            return 0, operations
        for name in _CONSUMED:
            setattr(args, name, getattr(saved, name) or 0)
        megatron.update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=True)
        return values["iteration"], operations

    def _add_random(self, state: dict[str, Any], saved: Any) -> None:
        """Adds the random generators, unless the layout has changed; then they begin with this job's seed."""
        args = self._args
        if args.no_load_rng or saved.no_save_rng:
            return
        changed = [name for name in (*_SIZES, *_EXPERT_SIZES) if getattr(saved, name) != getattr(args, name)]
        if changed:
            said = ", ".join(f"{name} was {getattr(saved, name)} and is {getattr(args, name)}" for name in changed)
            self._megatron.print_rank_0(f"RNG state will be ignored, as the layout has changed: {said}")
            return
        if args.data_parallel_random_init and saved.data_parallel_size != args.data_parallel_size:
            raise sf.Invalid(
                "--data-parallel-random-init: random states belong to data-parallel ranks, of which the checkpoint has "
                f"{saved.data_parallel_size} and this job {args.data_parallel_size}: pass --no-load-rng"
            )
        state["random"] = {self._place(): None}

    def _add_rerun(self, state: dict[str, Any], saved: Any, rerun: dict[str, Any] | None) -> None:
        """Adds the rerun state machine's state, if a rerun is pending and this job has the ranks that it is for."""
        if rerun is None or not self._megatron.get_rerun_state_machine().validate_state_dict(rerun):
            return
        if any(getattr(saved, name) != getattr(self._args, name) for name in (*_SIZES, *_JOB_SIZES)):
            self._megatron.print_rank_0("Job sharding has changed: Rerun state will be ignored")
            return
        state["rerun"] = {"own": sf.PerRank(None)}

    def _place(self) -> str:
        """Returns the place of this rank in the layout, as far as random generators differ by it."""
        mpu = self._megatron.mpu
        place = (
            f"tp{mpu.get_tensor_model_parallel_rank()}-pp{mpu.get_pipeline_model_parallel_rank()}"
            f"-ep{mpu.get_expert_model_parallel_rank()}-etp{mpu.get_expert_tensor_parallel_rank()}"
        )
        return f"{place}-dp{mpu.get_data_parallel_rank()}" if self._args.data_parallel_random_init else place

    def _random(self) -> dict[str, Any]:
        parallel = self._megatron.tensor_parallel
        trackers = parallel.get_cuda_rng_tracker().get_states()
        return {
            "python": random.getstate(),
            "numpy": self._megatron.np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(),
            "trackers": {name: parallel.convert_cuda_rng_state(now) for name, now in trackers.items()},
        }

    def _set_random(self, saved: dict[str, Any]) -> None:
        parallel = self._megatron.tensor_parallel
        tracker = parallel.get_cuda_rng_tracker()
        is_graph_safe = parallel.is_graph_safe_cuda_rng_tracker(tracker)
        random.setstate(saved["python"])
        self._megatron.np.random.set_state(saved["numpy"])
        torch.set_rng_state(saved["torch"])
        torch.cuda.set_rng_state(saved["cuda"])
        convert = parallel.convert_cuda_rng_state
        states = {name: convert(state, to_graphable=is_graph_safe) for name, state in saved["trackers"].items()}
        tracker.set_states(states)
