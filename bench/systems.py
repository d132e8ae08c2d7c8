"""The systems that save and load while one waits: ours and rivals, each in its best documented configuration.

A system saves and loads one rank's part of a sharded state. What a rival does not make durable by itself is made so
here, and counted: every file, then the directories.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import shardfast as sf
import torch
import torch.distributed as dist
from figures import OURS
from ranks import made
from shardfast import verbs
from shardfast.load_plan import LoadPlan
from shardfast.session import TIMEOUT_S
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
