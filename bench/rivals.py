"""The systems on a disk, ours and rivals, each in its best documented configuration: waited for, and in the background.

A `System` saves and loads one rank's part of a sharded state. The files and directories that a rival does not sync are
synced here, and counted. An `AsyncSystem` saves a module, its optimizer and some values while the training goes on.
"""

from __future__ import annotations

import os
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
from shardfast import verbs
from shardfast.session import TIMEOUT_S
from shardfast.state.load_plan import LoadPlan
from states import State
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save


class System(Protocol):
    """One way to save and load, durable when ``save`` returns.

    Attributes:
        name: In the tables.
        note: Its configuration, and what it leaves out.
        is_durable: Whether it is durable by itself when its own save returns.
        reshards: Whether this configuration loads into another layout.
    """

    name: str
    note: str
    is_durable: str
    reshards: bool

    def save(self, path: Path, state: State) -> None: ...
    def load(self, path: Path, state: State) -> None: ...


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sync_directories(path: Path) -> None:
    """``path``, the directories below it, and the name of ``path`` itself."""
    if dist.get_rank() == 0:
        for folder in [path, *(entry for entry in path.rglob("*") if entry.is_dir()), path.parent]:
            sync(folder)


def sync_files_of_rank(path: Path) -> None:
    """Every file below ``path``, shared out among the ranks; then the directories."""
    dist.barrier()
    files = sorted(entry for entry in path.rglob("*") if entry.is_file())
    for file in files[dist.get_rank() :: dist.get_world_size()]:
        sync(file)
    dist.barrier()
    sync_directories(path)


class Shardfast:
    name = OURS
    note = "sf.save and sf.load; checksums written and verified, atomic commit"
    is_durable = "yes"
    reshards = True

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.loads: list[LoadPlan] = []

    def save(self, path: Path, state: State) -> None:
        # What sf.save is; the handle tells when each phase ended.
        session, describer = verbs._describer(TIMEOUT_S)
        pending = verbs.begin(
            session,
            describer,
            path,
            {"model": state},
            step=None,
            pickle=False,
            prove=False,
            timeout_s=TIMEOUT_S,
            blocking=True,
        )
        pending.committed()
        self.reports.append(pending.report)

    def load(self, path: Path, state: State) -> None:
        self.loads.append(sf.load(path, {"model": state}))


class Dcp:
    reshards = True
    is_durable = "files; no directory"

    def __init__(self, threads: int) -> None:
        self.name = f"DCP, {threads} thread{'s' if threads > 1 else ''}"
        self.note = (
            f"FileSystemWriter(thread_count={threads}, sync_files=True); directories synced for it; no checksums"
        )
        self.threads = threads

    def save(self, path: Path, state: State) -> None:
        writer = FileSystemWriter(path, thread_count=self.threads, sync_files=True)
        dcp_save(dict(state), storage_writer=writer)
        sync_directories(path)

    def load(self, path: Path, state: State) -> None:
        dcp_load(dict(state), storage_reader=FileSystemReader(path))


class TorchCheckpointing:
    """Meta's torch_checkpointing, waited for."""

    name = "torch_checkpointing"
    is_durable = "no"
    note = (
        "SyncCheckpointSaverConfig, temporary directory and barrier, use_direct_io=False (O_DIRECT fails with EINVAL "
        "on ext4); no fsync of its own: synced for it; no checksums"
    )
    reshards = False

    def __init__(self, *, resharder: bool = False) -> None:
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        if resharder:
            self.name, self.reshards = "torch_checkpointing, resharder", True
        spec = ItemSpec(resharder=DefaultResharder()) if resharder else ItemSpec()
        self._manager = CheckpointManager.Config(
            items={"model": spec},
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        ).build()

    def save(self, path: Path, state: State) -> None:
        self._manager.save(str(path), {"model": dict(state)})
        sync_files_of_rank(path)

    def load(self, path: Path, state: State) -> None:
        loaded = self._manager.load(str(path), {"model": dict(state)})["model"]
        for name, tensor in state.items():
            if loaded[name] is not tensor:  # without a resharder it gives tensors of its own
                tensor.to_local().copy_(loaded[name].to_local())


class TorchSnapshot:
    name = "torchsnapshot"
    is_durable = "no"
    note = "Snapshot.take and restore of local shards (DTensor is not known to it): no resharding; synced for it"
    reshards = False

    def save(self, path: Path, state: State) -> None:
        from torchsnapshot import Snapshot

        Snapshot.take(str(path), self._application(state))
        sync_files_of_rank(path)

    def load(self, path: Path, state: State) -> None:
        from torchsnapshot import Snapshot

        Snapshot(str(path)).restore(self._application(state))

    def _application(self, state: State) -> dict[str, Any]:
        from torchsnapshot import StateDict

        return {"model": StateDict(**{name: tensor.to_local() for name, tensor in state.items()})}


class Safetensors:
    name = "safetensors"
    is_durable = "no"
    note = "one file a rank, local shards: no resharding, no commit, no checksums; synced for it"
    reshards = False

    def save(self, path: Path, state: State) -> None:
        from safetensors.torch import save_file

        path.mkdir(parents=True, exist_ok=True)
        file = path / f"rank{dist.get_rank()}.safetensors"
        save_file({name: tensor.to_local() for name, tensor in state.items()}, file)
        sync(file)
        dist.barrier()
        sync_directories(path)

    def load(self, path: Path, state: State) -> None:
        from safetensors import safe_open

        with safe_open(path / f"rank{dist.get_rank()}.safetensors", framework="pt") as file:
            for name, tensor in state.items():
                tensor.to_local().copy_(file.get_tensor(name))


class TorchSave:
    name = "torch.save"
    is_durable = "no"
    note = "one file a rank, local shards; torch.load(mmap=True), copied; no resharding, no commit; synced for it"
    reshards = False

    def save(self, path: Path, state: State) -> None:
        path.mkdir(parents=True, exist_ok=True)
        file = path / f"rank{dist.get_rank()}.pt"
        torch.save({name: tensor.to_local() for name, tensor in state.items()}, file)
        sync(file)
        dist.barrier()
        sync_directories(path)

    def load(self, path: Path, state: State) -> None:
        loaded = torch.load(path / f"rank{dist.get_rank()}.pt", mmap=True, weights_only=True)
        for name, tensor in state.items():
            tensor.to_local().copy_(loaded[name])


NOT_MEASURED = {
    "ByteCheckpoint 0.0.3": "not in a package index at that version, pins grpcio and protobuf that others refuse, and "
    "saves only FSDP2 and DDP objects, no plain state; its asynchronous save blocks for the whole write",
    "InstantTensor, checkpoint-engine, DataStates-LLM, PCcheck": "need CUDA",
    "Orbax": "needs JAX and its own process runtime",
    "DLRover, NVRx": "expect CUDA in places, or their own launcher",
}
"""What is not in the tables, and why."""


def systems(*, resharding: bool = False) -> tuple[list[System], dict[str, str]]:
    """Ours first, then the rivals; and those that cannot be made here, with the reason. Every rank calls it."""
    makers: dict[str, Callable[[], System]] = {Shardfast.name: Shardfast, "DCP, 1 thread": lambda: Dcp(1)}
    if resharding:
        makers["torch_checkpointing, resharder"] = lambda: TorchCheckpointing(resharder=True)
    else:
        makers |= {
            "DCP, 2 threads": lambda: Dcp(2),
            TorchCheckpointing.name: TorchCheckpointing,
            TorchSnapshot.name: TorchSnapshot,
            Safetensors.name: Safetensors,
            TorchSave.name: TorchSave,
        }
    return made(makers)


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
