"""What saves to S3 and loads from it: ours, rivals in their best documented configuration, and bare clients.

All find the server and their credentials in the environment of their process (``store_server.Server.environment``).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from figures import OURS
from ranks import made
from states import State
from store_server import REGION, Server
from systems import Shardfast
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

MIB = 1 << 20
CHECKSUM = "CRC64NVME"
"""What Shardfast sends with each part, by the name that obstore gives it."""


class StoreSystem(Protocol):
    """One way to save to S3 and to load from there; what is saved is durable when the service has confirmed it.

    Attributes:
        name: In the tables.
        note: Its configuration, and what it leaves out.
    """

    name: str
    note: str

    def save(self, prefix: str, state: State) -> None: ...
    def load(self, prefix: str, state: State) -> None: ...


class Ours:
    name = OURS
    note = "sf.save and sf.load; checksums written and verified, atomic commit"

    def __init__(self, server: Server) -> None:
        self.server = server
        self.shardfast = Shardfast()

    def save(self, prefix: str, state: State) -> None:
        self.shardfast.save(self.server.url(prefix), state)

    def load(self, prefix: str, state: State) -> None:
        self.shardfast.load(self.server.url(prefix), state)


class DcpFsspec:
    """DCP's own way to any place that fsspec knows."""

    def __init__(self, server: Server, threads: int) -> None:
        self.name = f"DCP with fsspec, {threads} thread{'s' if threads > 1 else ''}"
        self.note = (
            f"FsspecWriter(thread_count={threads}, sync_files=False) and FsspecReader with s3fs as it is; its "
            "sync_files=True syncs every disk of this machine; no atomic commit"
        )
        importlib.import_module("s3fs")  # fails here where it cannot be used
        self.bucket, self.threads = server.bucket, threads

    def save(self, prefix: str, state: State) -> None:
        from torch.distributed.checkpoint import FsspecWriter

        writer = FsspecWriter(f"s3://{self.bucket}/{prefix}", thread_count=self.threads, sync_files=False)
        dcp_save(dict(state), storage_writer=writer)

    def load(self, prefix: str, state: State) -> None:
        from torch.distributed.checkpoint import FsspecReader

        dcp_load(dict(state), storage_reader=FsspecReader(f"s3://{self.bucket}/{prefix}"))


class S3Connector:
    """AWS's connector for PyTorch: DCP over the client of AWS (CRT)."""

    name = "S3 connector's DCP writer"
    note = "S3StorageWriter(thread_count=2) and S3StorageReader (dcp_optimized), parts of 8 MiB; no atomic commit"

    def __init__(self, server: Server) -> None:
        from s3torchconnector import S3ClientConfig

        importlib.import_module("s3torchconnector.dcp")  # fails here where it cannot be used
        self.bucket = server.bucket
        self.config = S3ClientConfig(force_path_style=True)

    def save(self, prefix: str, state: State) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        path = f"s3://{self.bucket}/{prefix}"
        writer = S3StorageWriter(REGION, path, s3client_config=self.config, thread_count=2)
        dcp_save(dict(state), storage_writer=writer)

    def load(self, prefix: str, state: State) -> None:
        from s3torchconnector.dcp import S3StorageReader

        path = f"s3://{self.bucket}/{prefix}"
        dcp_load(dict(state), storage_reader=S3StorageReader(REGION, path, s3client_config=self.config))


class MultiStorage:
    """NVIDIA's multi-storage-client under DCP."""

    name = "MSC"
    note = (
        "multi-storage-client's MultiStorageFileSystemWriter and Reader(thread_count=2), transfers in Rust; through "
        "temporary files; no atomic commit"
    )
    PROFILE = "bench"

    def __init__(self, server: Server) -> None:
        options = {
            "base_path": server.bucket,
            "region_name": REGION,
            "endpoint_url": server.endpoint,
            "rust_client": {"allow_http": True},
        }
        keys = {"access_key": server.key, "secret_key": server.secret}
        profile = {
            "storage_provider": {"type": "s3", "options": options},
            "credentials_provider": {"type": "S3Credentials", "options": keys},
        }
        self.folder = tempfile.TemporaryDirectory()
        config = Path(self.folder.name, "msc.json")
        config.write_text(json.dumps({"profiles": {self.PROFILE: profile}}))
        os.environ["MSC_CONFIG"] = str(config)
        importlib.import_module("multistorageclient.contrib.torch")  # fails here where it cannot be used

    def save(self, prefix: str, state: State) -> None:
        from multistorageclient.contrib.torch import MultiStorageFileSystemWriter

        writer = MultiStorageFileSystemWriter(f"msc://{self.PROFILE}/{prefix}", thread_count=2, sync_files=False)
        dcp_save(dict(state), storage_writer=writer)

    def load(self, prefix: str, state: State) -> None:
        from multistorageclient.contrib.torch import MultiStorageFileSystemReader

        reader = MultiStorageFileSystemReader(f"msc://{self.PROFILE}/{prefix}", thread_count=2)
        dcp_load(dict(state), storage_reader=reader)


NOT_MEASURED = {
    "Run:ai model streamer": "loads safetensors only, and saves nothing",
    "torch_checkpointing 0.1.1": "has no storage but a file system",
    "torchsnapshot 0.1.0": "hands botocore a stream that the present botocore cannot sign with awscrt (ValueError)",
}
"""What is not in the tables, and why."""


def store_systems(server: Server) -> tuple[list[StoreSystem], dict[str, str]]:
    """Ours first, then the rivals; and those that cannot be made here, with the reason. Every rank calls it."""
    makers: dict[str, Callable[[], StoreSystem]] = {
        OURS: lambda: Ours(server),
        "DCP with fsspec, 1 thread": lambda: DcpFsspec(server, 1),
        "DCP with fsspec, 8 threads": lambda: DcpFsspec(server, 8),
        S3Connector.name: lambda: S3Connector(server),
        MultiStorage.name: lambda: MultiStorage(server),
    }
    return made(makers)


class Bare(Protocol):
    """A client that only moves the bytes of one object."""

    @property
    def name(self) -> str: ...
    def put(self, key: str, data: bytes) -> None: ...
    def get(self, key: str, size: int) -> None: ...


class Obstore:
    """The library object_store as it is, from Python; nothing is placed, and no checksum is sent but ``checksum``."""

    def __init__(self, server: Server, part_bytes: int, depth: int, checksum: str | None = None) -> None:
        self.name = f"obstore, {part_bytes // MIB} MiB × {depth}{f', {checksum}' if checksum else ''}"
        self.part_bytes, self.depth = part_bytes, depth
        self.store = open_store(server, checksum)

    def put(self, key: str, data: bytes) -> None:
        import obstore

        obstore.put(self.store, key, data, chunk_size=self.part_bytes, max_concurrency=self.depth)

    def get(self, key: str, size: int) -> None:
        asyncio.run(self._get(key, size))

    async def _get(self, key: str, size: int) -> None:
        import obstore

        slots = asyncio.Semaphore(self.depth)

        async def one(start: int) -> None:
            async with slots:
                end = min(start + self.part_bytes, size)
                part = await obstore.get_range_async(self.store, key, start=start, end=end)
                if len(part) != end - start:
                    raise AssertionError(f"{self.name} read {len(part)} bytes of {end - start}")

        await asyncio.gather(*[one(start) for start in range(0, size, self.part_bytes)])


class Crt:
    """The client of AWS (CRT), as the S3 connector brings it; it chooses its connections by a rate to aim at."""

    def __init__(self, server: Server, part_bytes: int, target_gbps: float) -> None:
        from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client

        self.name = f"AWS CRT, {part_bytes // MIB} MiB, {target_gbps:g} Gbit/s"
        self.bucket = server.bucket
        self.client = MountpointS3Client(
            REGION,
            throughput_target_gbps=target_gbps,
            part_size=part_bytes,
            endpoint=server.endpoint,
            force_path_style=True,
        )

    def put(self, key: str, data: bytes) -> None:
        stream = self.client.put_object(self.bucket, key)
        stream.write(data)
        stream.close()

    def get(self, key: str, size: int) -> None:
        found = sum(len(piece) for piece in self.client.get_object(self.bucket, key))
        if found != size:
            raise AssertionError(f"{self.name} read {found} bytes of {size}")


def bare_clients(server: Server, depths: tuple[int, ...]) -> tuple[list[Bare], dict[str, str]]:
    """The bare clients over part sizes and depths; those that cannot be made here, with the reason."""
    makers: dict[str, Callable[[], Bare]] = {}
    for part in (8 * MIB, 16 * MIB, 32 * MIB):
        for depth in depths:
            makers[f"obstore {part} {depth}"] = lambda part=part, depth=depth: Obstore(server, part, depth)
    for part, target in ((8 * MIB, 10.0), (16 * MIB, 10.0), (8 * MIB, 50.0)):
        makers[f"AWS CRT {part} {target}"] = lambda part=part, target=target: Crt(server, part, target)
    return made(makers)


def open_store(server: Server, checksum: str | None = None) -> Any:
    """The bucket for obstore. The payload is not signed: that is the fastest that it knows."""
    from obstore.store import S3Store

    options = {"checksum_algorithm": checksum} if checksum else {}
    return S3Store(
        server.bucket,
        endpoint=server.endpoint,
        access_key_id=server.key,
        secret_access_key=server.secret,
        region=REGION,
        unsigned_payload=True,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "300s"},
        **options,
    )


def delete(server: Server, prefix: str) -> None:
    """Deletes the objects below ``prefix``."""
    import obstore

    store = open_store(server)
    for page in obstore.list(store, prefix=prefix):
        obstore.delete(store, [entry["path"] for entry in page])
