"""Ray Train's and Ray Tune's trainings: Ray names checkpoints where Shardfast saves them, and copies no byte.

In the training function, on every worker::

    import shardfast.integrations.ray as shardfast_ray

    ckpt = sf.Checkpointer(shardfast_ray.run_url(), every=sf.steps(100), keep=sf.last(1))
    for step in range(shardfast_ray.restore(ckpt, state), total):
        ...
        ckpt.step(step + 1, state)
        shardfast_ray.report({"loss": loss}, ckpt)
    ckpt.close()

``result.checkpoint``, ``get_checkpoint()`` and ``CheckpointConfig`` keep their meaning. A checkpoint that Ray names is
pinned, so no rule of ``keep=`` deletes it; Ray deletes it by ``num_to_keep``.

Private names of Ray 2.60.0 that are used, for functions of Tune alone: ``ray.train._internal.session.get_session``,
and of its session ``world_rank``, ``loaded_checkpoint`` and, in its ``storage``, ``storage_filesystem``,
``trial_fs_path`` and ``persist_current_checkpoint``.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from typing import Any

import ray
import ray.train
import ray.train.collective
from ray.train._internal.session import get_session

import shardfast as sf

from . import ray_places as places
from .ray_ranks import meet
from .versions import expect_version

OLDEST = TESTED = "2.60.0"
_reported: weakref.WeakKeyDictionary[sf.Checkpointer, int] = weakref.WeakKeyDictionary()


def run_url() -> str:
    """Returns the place for this run's checkpoints, below the directory that Ray has for the run or the trial.

    Every worker calls it, before it makes the ``Checkpointer``. Workers without a process group of
    ``torch.distributed`` learn there where their ranks meet. A trial that begins from another trial's checkpoint gets a
    place of its own, so that the steps which it saved before stay.

    Raises:
        Unsupported: ``RunConfig.storage_path`` is in a storage that Shardfast does not know, or this Ray is too old.
    """
    expect_version("ray", ray.__version__, oldest=OLDEST, tried=TESTED)
    filesystem, directory = _storage()
    if _tune() is None:
        meet()
    named, path = _named(), f"{directory}/shardfast"
    if named is not None:
        is_own = named.path.startswith(f"{directory}/")
        path = named.path.rpartition("/")[0] if is_own else places.fresh(filesystem, path)
    return places.url_of(filesystem, path)


def url_of(checkpoint: Any) -> str:
    """Returns the URL of a checkpoint that Ray names, such as ``result.checkpoint``, for ``sf.load`` and the command.

    Raises:
        Unsupported: It is in a storage that Shardfast does not know.
    """
    return places.url_of(checkpoint.filesystem, checkpoint.path)


def restore(ckpt: sf.Checkpointer, state: dict[str, Any], *, pickle: bool = False, **options: Any) -> int:
    """Loads what the training goes on from; every worker calls it, before the first step.

    That is the newest committed checkpoint of the run, which can be newer than the one that Ray names: reports that a
    death kept from Ray are made again. If Ray names one of another run, as Tune does to a trial that exploits another,
    it is that one.

    Args:
        ckpt: The run, at :func:`run_url`.
        state: As in :func:`shardfast.load`.
        pickle: As in :func:`shardfast.load`, for a checkpoint of another run.
        **options: ``strict``, ``rename``, ``cast``, ``only``, ``per_rank`` and ``progress`` of :func:`shardfast.load`.

    Returns:
        The step that was restored; 0 if there is nothing yet.

    Raises:
        Invalid: The run is not below Ray's directory of it, or is that directory; all workers raise it.
        Error: As :func:`shardfast.load`.
    """
    filesystem, directory = _storage()
    run = places.run_of("restore", ckpt.url, filesystem, directory)
    if _tune() is None:
        meet()
    named = _named()
    if named is None or named.path.rpartition("/")[0] == run:
        step = ckpt.restore(state, **options)
        _report_lost(filesystem, run, -1 if named is None else places.step_of(named.path))
        return step
    sf.load(url_of(named), state, pickle=pickle, **options)
    return places.step_of(named.path)


def report(metrics: dict[str, Any], ckpt: sf.Checkpointer) -> None:
    """Reports metrics to Ray, with the newest save of ``ckpt`` if none was reported with it. Every worker calls it.

    With Ray Train it returns at once. Ray gets metrics and checkpoint together once the save is durable, in the order
    of the calls, as with its own ``CheckpointUploadMode.ASYNC``; a save that fails ends the group of workers, as an
    upload that fails does. In a function of Tune it waits until the save is durable.

    Args:
        metrics: As in ``ray.train.report``: those of rank 0 count.
        ckpt: The run, at :func:`run_url`.

    Raises:
        Invalid: The run is not below Ray's directory of it, or is that directory; all workers raise it.
    """
    filesystem, directory = _storage()
    run = places.run_of("report", ckpt.url, filesystem, directory)
    path, pinned = None, None
    if ckpt.saved is not None and _reported.get(ckpt) != ckpt.saved and _rank() == 0:
        path, _reported[ckpt] = places.path_of_step(run, ckpt.saved), ckpt.saved
        pinned = ckpt.when_durable(lambda url: places.pin(filesystem, path, metrics))
    if _tune() is not None:
        _report_to_tune(metrics, path, pinned)
    else:
        _report_to_train(metrics, filesystem, path, pinned)


def _report_lost(filesystem: Any, run: str, newest: int) -> None:
    """Reports checkpoints behind ``newest`` again: a job that died has pinned them, and Ray does not name them."""
    lost = places.lost(filesystem, run, newest) if _rank() == 0 else []
    if _tune() is not None:
        for path, _ in lost:  # it tells Tune of none twice, and Tune has waited for each
            places.unpin(filesystem, path)
        return
    for path, metrics in ray.train.collective.broadcast_from_rank_zero(lost):
        _report_to_train(metrics, filesystem, path if _rank() == 0 else None, None)


def _report_to_train(metrics: dict[str, Any], filesystem: Any, path: str | None, pinned: Future[None] | None) -> None:
    def committed(given: Any, name: str) -> Any:
        if pinned is not None:
            pinned.result()
        return given

    ray.train.report(
        metrics,
        None if path is None else ray.train.Checkpoint(path, filesystem),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=committed,
        delete_local_checkpoint_after_upload=False,
    )


def _report_to_tune(metrics: dict[str, Any], path: str | None, pinned: Future[None] | None) -> None:
    from ray import tune  # a worker of Ray Train has no use for it, and it takes most of a second

    storage = _tune().storage
    if path is None or pinned is None:
        tune.report(metrics)
        return
    pinned.result()
    storage.persist_current_checkpoint = lambda given: given  # it would copy the files
    try:
        tune.report(metrics, checkpoint=tune.Checkpoint(path, storage.storage_filesystem))
    finally:
        vars(storage).pop("persist_current_checkpoint", None)


def _tune() -> Any:
    """The session of a function of Tune; ``None`` in a worker of Ray Train."""
    session = get_session()
    if session is not None and session.world_rank is not None:
        raise sf.Unsupported("Ray Train's first version, RAY_TRAIN_V2_ENABLED=0: expected its second one, the default")
    return session


def _rank() -> int:
    return 0 if _tune() is not None else ray.train.get_context().get_world_rank()


def _named() -> Any:
    """The checkpoint that Ray would have the training begin with."""
    session = _tune()
    return ray.train.get_checkpoint() if session is None else session.loaded_checkpoint


def _storage() -> tuple[Any, str]:
    """Ray's file system, and its directory there for this run or trial."""
    session = _tune()
    if session is not None:
        return session.storage.storage_filesystem, session.storage.trial_fs_path
    try:
        storage = ray.train.get_context().get_storage()
    except NotImplementedError:
        raise sf.Unsupported("ScalingConfig(num_workers=0): it has no storage: expected at least one worker") from None
    return storage.storage_filesystem, storage.experiment_fs_path
