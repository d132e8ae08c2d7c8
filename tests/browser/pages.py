"""Makes the runs and the reports that the browser is shown, with the packages of .venv: ``pages.py DIRECTORY``.

``real`` in it is a run of eight processes, one of which is stopped for a while; ``large`` one of 8,960 ranks and 100
saves, whose records are written here as docs/format.md says. Each has a page, the report as JSON, and a trace.
"""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))  # before this folder, whose conftest is another one
from conftest import Process, outcomes
from facts import PER_MACHINE, RANKS, SAVES, SLOW_RANK, SLOW_SAVE, STAGE, STOPPED, TENSOR, WORLD
from rank_server import Rank, RankServer
from test_report import trains

COMMAND = Path(sys.executable).with_name("shardfast")
DEADLINE_S = 240.0
DTYPES = {"uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64"}


def saved(directory: Path) -> Path:
    """A run of eight processes, and the file of their events beside it."""
    run = directory / "real"
    os.environ["SHARDFAST_EVENTS"] = str(directory / "events.jsonl")
    server, meet = RankServer(), f"file://{directory}/rendezvous"
    ranks = [Rank(number, WORLD, meet, DEADLINE_S) for number in range(WORLD)]
    processes = [Process(server, trains, (str(run), STOPPED), rank) for rank in ranks]
    for done, result in outcomes(processes, DEADLINE_S):
        assert done, result
    server.close()
    return run


def crc64(streams: np.ndarray) -> np.ndarray:
    """CRC-64/NVME of each row of bytes."""
    table = np.arange(1 << 16, dtype=np.uint64)
    for _ in range(16):
        table = (table >> np.uint64(1)) ^ (table & np.uint64(1)) * np.uint64(0x9A6C9329AC4BC9B5)
    assert streams.shape[1] % 2 == 0
    words = np.ascontiguousarray(streams.view("<u2").T).astype(np.uint64)
    crc = np.full(len(streams), 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)
    low, sixteen = np.uint64(0xFFFF), np.uint64(16)
    for word in words:
        crc = table[(crc ^ word) & low] ^ crc >> sixteen
    return crc ^ np.uint64(0xFFFFFFFFFFFFFFFF)


def stream(notes: dict[str, str], columns: dict[str, np.ndarray]) -> bytes:
    """What the checksum of a record is of."""
    parts = [part for name, note in sorted(notes.items()) for part in (name.encode(), b"\0", note.encode(), b"\0")]
    for name, column in sorted(columns.items()):
        dtype, lengths = DTYPES[column.dtype.name], struct.pack("<2Q", *column.shape)
        parts += [name.encode(), b"\0", dtype.encode(), b"\0", lengths, column.tobytes()]
    return b"".join(parts)


def container(notes: dict[str, str], columns: dict[str, np.ndarray]) -> bytes:
    header: dict[str, object] = {"__metadata__": notes}
    start = 0
    for name, column in sorted(columns.items()):
        span = [start, start := start + column.nbytes]
        header[name] = {"dtype": DTYPES[column.dtype.name], "shape": list(column.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(column.tobytes() for _, column in sorted(columns.items()))


def noted(record: Path) -> dict[str, str]:
    data = record.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]


def of_a_save(number: int, like: dict[str, str]) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Notes and columns of a save of many ranks; one of the saves has a slow rank."""
    dice = np.random.default_rng(number)
    phases, kinds = json.loads(like["shardfast.phases"]), json.loads(like["shardfast.operations"])
    machines = [f"node-{machine:04}" for machine in range(RANKS // PER_MACHINE)]
    us = {}
    us["planned"] = dice.uniform(2_000, 5_000, RANKS)
    us["captured"] = us["planned"] + dice.uniform(500, 1_000, RANKS)
    us["staged"] = us["captured"] + dice.uniform(300_000, 500_000, RANKS)
    us["written"] = us["staged"] + dice.uniform(8_000_000, 9_500_000, RANKS)
    if number == SLOW_SAVE:
        us["written"][SLOW_RANK] += 11_000_000
    us["agreed"] = np.maximum(us["written"], us["planned"].max())
    us["durable"] = us["agreed"] + dice.uniform(5_000, 20_000, RANKS)
    us["committed"] = us["durable"].max() + dice.uniform(60_000, 61_000, RANKS)
    ends = np.stack([us.get(phase, np.zeros(RANKS)) for phase in phases], axis=1).astype("<u4")
    count, bytes_moved, busy, longest = (np.zeros((RANKS, len(kinds)), dtype) for dtype in ("<u4", "<u8", "<u8", "<u4"))
    large = kinds.index("large_writes")
    count[:, large], bytes_moved[:, large] = 16, 16 << 26
    busy[:, large] = us["written"] - us["planned"]
    longest[:, large] = busy[:, large] // 10
    by_duration = np.zeros((RANKS, len(kinds) * 8), "<u2")
    by_duration[:, large * 8 + 5] = 16
    kept = sorted({0, SLOW_RANK, *dice.integers(0, RANKS, 5).tolist()})
    objects = [f"model/{rank:05}-000-0123456789abcdef.safetensors" for rank in kept] + ["write x: 503 SlowDown"]
    # Rank, word, begin, duration, offset, bytes, object, attempt, failure.
    events = []
    for at, rank in enumerate(kept):
        took = (us["written"][rank] - us["planned"][rank]) / 16
        for part in range(16):
            began = us["planned"][rank] + part * took
            events.append((rank, 0, began, 0.9 * took, part << 26, 1 << 26, at, 0, 0))
            if number == SLOW_SAVE and rank == SLOW_RANK and part % 5 == 1:
                events[-1] = (*events[-1][:-1], 1)
                events.append((rank, 1, began + 0.9 * took, 0.1 * took, 0, 0, len(kept), 1 + part // 5, 1))
        if number == SLOW_SAVE and rank == 0:
            # Many small ones, and many on one object.
            few = [(0, 0, began + 100 * n, 90, 0, 11 << 10, len(kept) + 1 + n % 90, 0, 0) for n in range(500)]
            events += [*few, *((0, 0, 2000 + 9000 * n, 5000, n << 20, 1 << 20, at, 0, 0) for n in range(400))]
            objects += [f"loader/{n:05}-000-0123456789abcdef.safetensors" for n in range(90)]
    events.sort(key=lambda event: (event[0], event[2]))
    event = [np.array(of)[:, None] for of in zip(*events, strict=True)]
    one, ranks = np.ones((RANKS, 1)), np.arange(RANKS)
    columns = {
        "said": one.astype("<u1"),
        "page_locked": one.astype("<u1"),
        "machine": np.repeat(np.arange(len(machines)), PER_MACHINE)[:, None].astype("<u4"),
        "local_rank": np.tile(np.arange(PER_MACHINE), len(machines))[:, None].astype("<u2"),
        # Stages of a pipeline, data parallel ranks, and four-way tensor parallelism within a machine.
        "coordinates": np.stack([ranks // STAGE, ranks % STAGE // TENSOR, ranks % TENSOR], axis=1).astype("<u2"),
        "phases_us": ends,
        "files": one.astype("<u4"),
        "failed": np.zeros((RANKS, 2), "<u4"),
        "ended_us": us["committed"][:, None].astype("<u8"),
        "paused_us": (0 * one).astype("<u8"),
        "stalled_us": (1_100 * one).astype("<u4"),
        "awaited_us": (0 * one).astype("<u4"),
        "worked_ms": np.zeros((RANKS, 2), "<u4"),
        "held_up_us": np.zeros((RANKS, 2), "<u4"),
        "count": count,
        "bytes": bytes_moved,
        "busy_us": busy,
        "longest_us": longest,
        "by_duration": by_duration,
        "failure": (0 * one).astype("<u4"),
        "slowest": one.astype("<u4"),
        "event_rank": event[0].astype("<u4"),
        "event": event[1].astype("<u1"),
        "event_began_us": event[2].astype("<u4"),
        "event_took_us": event[3].astype("<u4"),
        "event_offset": event[4].astype("<u8"),
        "event_bytes": event[5].astype("<u8"),
        "event_object": event[6].astype("<u4"),
        "event_attempt": event[7].astype("<u2"),
        "event_failed": event[8].astype("<u1"),
    }
    notes = {name: note for name, note in like.items() if name != "crc64"} | {
        "shardfast.step": f"{1000 + number}",
        "shardfast.began_unix_ms": f"{1_800_000_000_000 + 60_000 * number}",
        "shardfast.machines": json.dumps(machines),
        "shardfast.mesh": json.dumps(["pp", "dp", "tp"]),
        "shardfast.texts": json.dumps(["model/00000-000.safetensors"]),
        "shardfast.missing": "[]",
        "shardfast.events": json.dumps(["write", "retry"]),
        "shardfast.event_objects": json.dumps(objects),
        "shardfast.events_left_out": json.dumps({str(rank): 0 for rank in kept}),
    }
    return notes, columns


def generated(directory: Path, like: dict[str, str]) -> Path:
    """A run of many ranks and saves, of which there are records alone."""
    place = directory / "large" / ".telemetry"
    place.mkdir(parents=True)
    records = [of_a_save(number, like) for number in range(SAVES)]
    of_length: dict[int, list[int]] = {}
    streams = [stream(*record) for record in records]
    for number, text in enumerate(streams):
        of_length.setdefault(len(text), []).append(number)
    for length, numbers in of_length.items():
        rows = np.stack([np.frombuffer(streams[number], dtype=np.uint8) for number in numbers])
        sums = crc64(rows[:, : length & ~1])
        for number, found in zip(numbers, sums.tolist(), strict=True):
            if length & 1:
                found = after(found, streams[number][-1])
            notes, columns = records[number]
            name = f"{notes['shardfast.began_unix_ms']}-save-{1000 + number:08}.safetensors"
            (place / name).write_bytes(container(notes | {"crc64": f"{found:016x}"}, columns))
    return place.parent


def after(crc: int, byte: int) -> int:
    """The checksum of bytes and one more."""
    crc = (crc ^ 0xFFFFFFFFFFFFFFFF) ^ byte
    for _ in range(8):
        crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFFFFFFFFFF


def reported(run: Path, *, step: int | None = None) -> None:
    """Puts the page of a run, its report as JSON and its trace beside it."""
    began = time.monotonic()
    failures = ["--mtbf", "1h"]
    page = ["--out", run.with_suffix(".html"), *failures]
    subprocess.run([COMMAND, "report", run, *page], check=True, stdout=subprocess.DEVNULL)
    print(f"{run.name}: its page was made in {time.monotonic() - began:.1f} s")
    only = [] if step is None else ["--step", f"{step}"]
    as_json = ["--json", *(only or failures)]
    text = subprocess.run([COMMAND, "report", run, *as_json], check=True, stdout=subprocess.PIPE).stdout
    run.with_suffix(".json").write_bytes(text)
    trace = run.with_suffix(".trace.json")
    subprocess.run([COMMAND, "report", run, "--trace", trace, *only], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    into = Path(sys.argv[1])
    real = saved(into)
    reported(real)
    record = min((real / ".telemetry").glob("*-save-*.safetensors"))
    reported(generated(into, noted(record)), step=1000 + SLOW_SAVE)
    os._exit(0)  # without what libraries say when they are unloaded
