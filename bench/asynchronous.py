"""The systems that save while the training goes on: a module, its optimizer and some Python values of each rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import shardfast as sf
import torch
import torch.distributed as dist
from figures import OURS
from ranks import made


class AsyncSystem(Protocol):
    """One way to save in the background.

    Attributes:
        name: In the tables.
        note: Its configuration, and what ``finish`` means.
    """

    name: str
    note: str

    def begin(self, path: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, values: Any) -> None:
        """Begins a save; forward and backward may run when it returns."""

    def before_step(self) -> None:
        """Waits until the optimizer may step."""

    def is_done(self) -> bool:
        """Whether the save has ended."""

    def finish(self) -> None:
        """Waits until the save has ended."""

    def close(self) -> None:
        """Ends threads and processes of its own."""


class ShardfastAsync:
    name = OURS
    note = "sf.save_async; ends when durable and committed"

    def __init__(self) -> None:
        self._pending: sf.Pending | None = None

    def begin(self, path: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, values: Any) -> None:
        self._pending = sf.save_async(path, {"model": module, "optimizer": optimizer, "extra": values})

    def before_step(self) -> None:
        self.pending.staged()  # what the hook of the optimizer does

    def is_done(self) -> bool:
        return self.pending.done()

    def finish(self) -> None:
        self.pending.committed()

    def close(self) -> None:
        self._pending = None

    @property
    def pending(self) -> sf.Pending:
        assert self._pending is not None, "begin() was not called"
        return self._pending


class DcpAsync:
    """DCP with a stager that is kept across saves and copies in the background, and a process group of its own."""

    def __init__(self, *, process: bool) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.name = f"DCP async, {'process' if process else 'thread'}"
        pinned = torch.cuda.is_available()
        self.note = (
            f"one DefaultStager kept across saves, asynchronous staging, shared memory={process}, pinned={pinned}"
            f"{'' if pinned else ' (needs CUDA)'}; FileSystemWriter(thread_count=2, sync_files=True); "
            "ends with files synced"
        )
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned,
                use_shared_memory=process,
                use_async_staging=True,
                use_non_blocking_copy=pinned,
            )
        )
        self._type = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        # Beside a training on the same group its collectives would interleave with the training's and hang.
        self._group: Any = None if process else dist.new_group(backend="gloo")
        self._staged: Future[None] | None = None
        self._ended: Future[Any] | None = None

    def begin(self, path: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, values: Any) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import async_save

        weights, moments = get_state_dict(module, optimizer)
        response = async_save(
            {"model": weights, "optimizer": moments, "extra": values},
            storage_writer=FileSystemWriter(path, thread_count=2, sync_files=True),
            async_checkpointer_type=self._type,
            async_stager=self._stager,
            process_group=self._group,
        )
        if isinstance(response, Future):
            self._staged, self._ended = None, response
        else:
            self._staged, self._ended = response.staging_completion, response.upload_completion

    def before_step(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def is_done(self) -> bool:
        return self._ended is None or self._ended.done()

    def finish(self) -> None:
        if self._ended is not None:
            self._ended.result()

    def close(self) -> None:
        self._stager.close()


class TorchCheckpointingAsync:
    name = "torch_checkpointing async"

    def __init__(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self.note = (
            "AsyncCheckpointSaverConfig (its own process, shared staging memory, pinned only with CUDA), the step "
            "under manager.lock(), use_direct_io=False; ends renamed, not synced"
        )
        self._manager = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=200)),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        ).build()
        self._ended: Future[Any] | None = None

    def begin(self, path: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, values: Any) -> None:
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "extra": values}
        self._ended = self._manager.save(str(path), state)

    def before_step(self) -> None:
        lock: AbstractContextManager[Any] = self._manager.lock()
        with lock:
            pass

    def is_done(self) -> bool:
        return self._ended is None or self._ended.done()

    def finish(self) -> None:
        if self._ended is not None:
            self._ended.result()

    def close(self) -> None:
        self._manager.close()


class TorchSnapshotAsync:
    name = "torchsnapshot async"
    note = "Snapshot.async_take; ends written, not synced"

    def __init__(self) -> None:
        import torchsnapshot

        self._package = torchsnapshot
        self._pending: Any = None

    def begin(self, path: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, values: Any) -> None:
        extra = self._package.StateDict(**values)
        state = {"model": module, "optimizer": optimizer, "extra": extra}
        self._pending = self._package.Snapshot.async_take(str(path), state)

    def before_step(self) -> None:
        """The call returns when all is copied."""

    def is_done(self) -> bool:
        done: bool = self._pending.done()
        return done

    def finish(self) -> None:
        self._pending.wait()

    def close(self) -> None:
        self._pending = None


def asynchronous_systems(*, own_processes: bool = True) -> tuple[list[AsyncSystem], dict[str, str]]:
    """Ours first, then the rivals; and those that cannot be made here, with the reason. Every rank calls it.

    Without ``own_processes`` those that need processes of their own, which are long in starting, are left out.
    """
    makers: dict[str, Callable[[], AsyncSystem]] = {
        ShardfastAsync.name: ShardfastAsync,
        "DCP async, thread": lambda: DcpAsync(process=False),
        TorchSnapshotAsync.name: TorchSnapshotAsync,
    }
    if own_processes:
        makers |= {
            "DCP async, process": lambda: DcpAsync(process=True),
            TorchCheckpointingAsync.name: TorchCheckpointingAsync,
        }
    return made(makers)


def show_notes(notes: dict[str, str], failed: dict[str, str]) -> None:
    for name, note in notes.items():
        print(f"  {name}: {note}")
    for name, reason in failed.items():
        print(f"  not in the table: {name}: {reason}")
