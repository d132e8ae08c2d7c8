"""Megatron's own training loop, saved and loaded by Shardfast.

Call :func:`attach` before ``pretrain()``::

    from megatron.training import pretrain
    from shardfast.integrations.megatron import attach

    attach()
    pretrain(...)

Megatron's arguments keep their meaning; ``--save`` and ``--load`` may be URLs of object stores. An iteration is the
checkpoint ``<save>/iter_0004000``. Directories that Megatron wrote are loaded by Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shardfast as sf

from . import megatron_arguments as arguments
from .megatron_places import Found, expect_free, find, is_ours, names_any
from .megatron_state import State, progress
from .megatron_trackers import checkpoint_of, trackers, whole_parameters
from .trackers import Saves


def attach() -> None:
    """Replaces what Megatron's training loop calls to save and to load. A second call does nothing.

    Replaced are ``save_checkpoint`` and ``load_checkpoint``, with the same parameters, and how asynchronous saves end.
    Arguments whose meaning Shardfast does not have are refused when ``pretrain()`` begins. Functions that a program
    has imported before are not replaced: call this first.

    Raises:
        Unsupported: This Megatron-Core has no ``megatron.training``.
    """
    try:
        from megatron.core import __version__
        from megatron.training import async_utils, checkpointing, initialize, training
    except ImportError as error:
        raise sf.Unsupported(
            f"attach(): megatron.training cannot be imported ({error}): expected megatron-core 0.17 or later, or "
            "Megatron-LM's repository on the path"
        ) from error
    if not arguments.is_replaced(training.save_checkpoint):
        arguments.warn_of_version(__version__)
        loop = _Loop(checkpointing)
        for modules, name, made in (
            ((checkpointing, training), "save_checkpoint", loop.save),
            ((checkpointing, training), "load_checkpoint", loop.load),
            ((checkpointing,), "load_args_from_checkpoint", loop.load_args),
            ((async_utils, training), "maybe_finalize_async_save", loop.finalize),
            ((initialize,), "init_persistent_async_worker", loop.start_no_worker),
            ((training,), "initialize_megatron", loop.initialize),
            ((training,), "setup_model_and_optimizer", loop.set_up),
        ):
            replaced = arguments.in_place_of(getattr(modules[0], name), made)
            for module in modules:
                setattr(module, name, replaced)


class _Loop:
    """The saves and loads of one process's training loop.

    Args:
        checkpointing: ``megatron.training.checkpointing``.
    """

    def __init__(self, checkpointing: Any) -> None:
        self._megatron = checkpointing
        self._trackers = trackers()
        self._saves = Saves()
        self._newest: tuple[Any, ...] | None = None

    def initialize(self, original: Callable[[], Any], given: dict[str, Any]) -> Any:
        """``initialize_megatron``: the arguments are known when it returns."""
        result = original()
        arguments.expect_understood(self._megatron.get_args())
        return result

    def set_up(self, original: Callable[[], Any], given: dict[str, Any]) -> Any:
        """``setup_model_and_optimizer``: the training begins behind it, at the iteration that was loaded."""
        made = original()
        expect_free(self._megatron.get_args(), self._trackers, self._megatron)
        return made

    def start_no_worker(self, original: Callable[[], Any], given: dict[str, Any]) -> None:
        """``init_persistent_async_worker``: saves need no process of their own."""

    def save(self, original: Callable[[], Any], given: dict[str, Any]) -> None:
        """Saves as ``save_checkpoint`` does."""
        args, megatron, iteration = self._megatron.get_args(), self._megatron, int(given["iteration"])
        arguments.expect_understood(args)
        arguments.expect_call_understood("save_checkpoint", given)
        state = State(args, megatron, given["model"], given["optimizer"], given["opt_param_scheduler"])
        key = (args.save, iteration, progress(args, given["opt_param_scheduler"]))
        if self._newest == key and not state.is_rerun_pending():
            megatron.print_rank_0(f"  iteration {iteration:7d} is saved to {args.save} already")
            return
        productive = megatron.on_save_checkpoint_start(args.async_save)
        megatron.ft_integration.on_checkpointing_start()
        url, tracker = checkpoint_of(args.save, iteration), self._trackers.of(args.save)
        megatron.print_rank_0(f"saving checkpoint at iteration {iteration:7d} to {url}")

        def conclude() -> None:
            megatron.print_rank_0(f"  successfully saved checkpoint from iteration {iteration:7d} to {args.save}")
            if args.log_progress and args.async_save:
                megatron.append_to_progress_log(
                    args.save, f"Saved async checkpoint\tIteration: {iteration}", barrier=False
                )
            if megatron.is_last_rank():
                megatron.on_save_checkpoint_success(productive, args.async_save)
                megatron.wandb_utils.on_save_checkpoint_success(url, tracker.name, args.save, iteration)

        saved = state.to_save(iteration, given["num_floating_point_operations_so_far"], given["train_data_iterator"])
        if args.async_save:
            with whole_parameters(given["model"]):
                self._saves.begin(
                    lambda: sf.save_async(url, saved, step=iteration),
                    lambda: tracker.write(str(iteration), iteration),
                    conclude,
                )
        else:
            with whole_parameters(given["model"]):
                sf.save(url, saved, step=iteration)
            tracker.write(str(iteration), iteration)
            megatron.torch.distributed.barrier()
            conclude()
        self._newest = key
        megatron.ft_integration.on_checkpointing_end(is_async_finalization=False)

    def finalize(self, original: Callable[[], Any], given: dict[str, Any]) -> None:
        """``maybe_finalize_async_save``: raises what failed in the background."""
        self._saves.settle(0 if given["blocking"] else None)

    def load(self, original: Callable[[], Any], given: dict[str, Any]) -> Any:
        """``load_checkpoint``: the iteration that was loaded, and the floating-point operations until then."""
        args, megatron = self._megatron.get_args(), self._megatron
        arguments.expect_understood(args)
        arguments.expect_call_understood("load_checkpoint", given)
        self._saves.settle(0)
        place = getattr(args, given["load_arg"])
        if args.pretrained_checkpoint is not None and not names_any(place, self._trackers):
            found = find(place := args.pretrained_checkpoint, args, self._trackers, megatron)
            args.finetune = args.finetune or found is not None
        else:
            found = find(place, args, self._trackers, megatron)
        if found is None or found.values is None:
            result = original()
        else:
            state = State(args, megatron, given["ddp_model"], given["optimizer"], given["opt_param_scheduler"])
            result = state.load(found.url, found.values, strict=given["strict"])
            self._loaded(place, found, result[0])
        if found is not None and place == args.save and not (args.finetune or args.no_load_optim or args.no_load_rng):
            self._newest = (place, result[0], progress(args, given["opt_param_scheduler"]))
        return result

    def _loaded(self, place: str, found: Found, iteration: int) -> None:
        """Tells the rest of Megatron of a load."""
        megatron = self._megatron
        megatron.set_loaded_iteration(found.iteration)
        megatron.print_rank_0(f"  successfully loaded checkpoint from {found.url} at iteration {iteration}")
        if megatron.is_last_rank():
            megatron.wandb_utils.on_load_checkpoint_success(found.url, place)
        if iteration > 0:
            megatron.ft_integration.on_checkpoint_loaded(is_local_chkpt=False)

    def load_args(self, original: Callable[[], Any], given: dict[str, Any]) -> Any:
        """``load_args_from_checkpoint``, which ``--use-checkpoint-args`` calls before the ranks have met."""
        place = getattr(given["args"], given["load_arg"])
        if place is not None and is_ours(place, given["args"], self._megatron):
            raise sf.Unsupported(
                f"--use-checkpoint-args: {place} is Shardfast's, which does not give a model its arguments: pass them"
            )
        return original()
