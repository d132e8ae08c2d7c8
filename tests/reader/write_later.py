"""Writes checkpoints of an invented version 1.7, which today's readers must refuse by name instead of misreading them.

    python tests/reader/write_later.py    # into tests/reader/later/, one directory for each

Each one is what section 11 of ``docs/format.md`` lets a later version write, or what a writer does that forgot to say
so. Every checksum is right. ``readable`` uses nothing that a reader must know, so today's readers take it.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import struct
from dataclasses import dataclass, field

from shardfast_reader import BLOCK_BYTES, COLUMNS, crc64

LATER = pathlib.Path(__file__).parent / "later"
ATTEMPT = "fedcba9876543210"
MANIFEST = f"manifest-{ATTEMPT}"
WEIGHTS = f"model/00000-000-{ATTEMPT}.safetensors"
ARGS = f"extra/00000-000-{ATTEMPT}.safetensors"
ELSEWHERE = "../step-00000900"
HEADER_BYTES = 4096

# The tensor model/w, F32 [16], is stored in halves; extra/args is a value.
HALF = struct.pack("<8f", *[1.0] * 8)
VALUE = bytes.fromhex("a1626c72fb3fb999999999999a")


@dataclass
class Later:
    """What one of the checkpoints has of version 1.7."""

    requires: str = ""
    half: bytes = HALF
    location: int = 0
    columns: dict[str, tuple[str, list[int]]] = field(default_factory=dict)


# The same bytes in another order: as many as before, so that only the column tells.
SHUFFLED = b"".join(HALF[i::4] for i in range(4))
# A float and how often it stands there.
RUN = struct.pack("<fQ", 1.0, 8)
CODEC = {"regions.codec": ("U8", [1, 1])}

CHECKPOINTS = {
    "readable": Later(columns={"info.saved_ms": ("U64", [12])}),
    "unknown-feature": Later(requires="delta>=1.3"),
    "codec-column": Later(half=SHUFFLED, columns=CODEC),
    "compressed": Later(requires="codec>=1.4 delta>=1.3", half=RUN, columns=CODEC),
    "stored-bytes": Later(half=RUN),
    "file-elsewhere": Later(requires="files-elsewhere>=1.5", location=1),
    "file-elsewhere-unannounced": Later(location=1),
}


def container(metadata: dict[str, str], tensors: dict[str, tuple[str, int, bytes]], align: int) -> bytes:
    """A safetensors file: its tensors by name, each with its dtype, its only dimension and its bytes."""
    header: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for name, (dtype, rows, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [rows], "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    size = -(-(8 + len(text)) // align) * align - 8
    return struct.pack("<Q", size) + text.ljust(size) + b"".join(data for _, _, data in tensors.values())


def data_file(tensors: dict[str, tuple[str, int, bytes]]) -> bytes:
    """A data file of these tensors."""
    data = b"".join(data for _, _, data in tensors.values())
    blocks = [crc64(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)]
    metadata = {
        "shardfast.blocks": "".join(f"{crc:016x}" for crc in blocks),
        "shardfast.block_bytes": str(BLOCK_BYTES),
        "format": "pt",
    }
    return container(metadata, tensors, HEADER_BYTES)


def ends(texts: list[str]) -> list[int]:
    """Cumulative ends of texts that stand one after the other."""
    return [len("".join(texts[: i + 1])) for i in range(len(texts))]


def manifest(later: Later, weights: bytes, args: bytes) -> bytes:
    """The manifest over these two files."""
    paths, strings = [WEIGHTS, ARGS], [ELSEWHERE, "", "extra", "args", "model", "w"]
    rows = {
        "files.paths": list("".join(paths).encode()),
        "files.path_ends": ends(paths),
        "files.location": [later.location, 0],
        "files.bytes": [len(weights), len(args)],
        "files.data_start": [HEADER_BYTES, HEADER_BYTES],
        "files.header_crc": [crc64(weights[:HEADER_BYTES]), crc64(args[:HEADER_BYTES])],
        "strings.text": list("".join(strings).encode()),
        "strings.ends": ends(strings),
        "leaves.key": [2, 4],
        "leaves.name": [3, 5],
        "leaves.layout": [1, 1],
        "leaves.kind": [1, 0],
        "leaves.dtype": [0, 15],
        "leaves.alias_of": [0, 0],
        "leaves.dims_end": [0, 1],
        "leaves.regions_end": [0, 2],
        "leaves.values_end": [1, 1],
        "shapes": [16],
        "regions.offsets": [0, 8],
        "regions.lengths": [8, 8],
        "regions.file": [0, 0],
        "regions.file_offset": [HEADER_BYTES, HEADER_BYTES + len(later.half)],
        "regions.bytes": [len(HALF)] * 2,
        "regions.stored_bytes": [len(later.half)] * 2,
        "values.ranks_end": [1],
        "values.file": [1],
        "values.file_offset": [HEADER_BYTES],
        "values.bytes": [len(VALUE)],
        "values.stored_bytes": [len(VALUE)],
        "ranks.start": [0],
        "ranks.stop": [1],
    }
    columns = {name: (COLUMNS[name], values) for name, values in rows.items()} | later.columns
    codes = {"U8": "B", "U32": "I", "U64": "Q"}
    tensors = {
        name: (dtype, len(values), struct.pack(f"<{len(values)}{codes[dtype]}", *values))
        for name, (dtype, values) in sorted(columns.items(), key=lambda item: -int(item[1][0][1:]))
    }
    metadata = {
        "shardfast.format": "1.7",
        "shardfast.requires": later.requires,
        "shardfast.attempt": ATTEMPT,
        "shardfast.world": "1",
        "shardfast.created_unix_ms": "1795000000000",
        "shardfast.writer": "shardfast 7.0.0",
        "shardfast.mood": "good",
    }
    return container(metadata, tensors, 8)


def files(later: Later) -> dict[str, bytes]:
    """All files of a checkpoint. One that lies elsewhere is not among them."""
    stored = ("F32", 8, later.half) if len(later.half) == len(HALF) else ("U8", len(later.half), later.half)
    weights = data_file({"w[0:8]": stored, "w[8:16]": stored})
    args = data_file({"args": ("U8", len(VALUE), VALUE)})
    table = manifest(later, weights, args)
    body = (
        f"shardfast 1.7\nattempt {ATTEMPT}\nmanifest {MANIFEST}\nmanifest_bytes {len(table)}\n"
        f"manifest_sha256 {hashlib.sha256(table).hexdigest()}\ncolour blue\n"
    )
    record = f"{body}crc64 {crc64(body.encode()):016x}\n".encode()
    here = {WEIGHTS: weights} if later.location == 0 else {}
    return {"COMMIT": record, MANIFEST: table, ARGS: args} | here


if __name__ == "__main__":
    for name, later in CHECKPOINTS.items():
        for path, data in files(later).items():
            (LATER / name / path).parent.mkdir(parents=True, exist_ok=True)
            (LATER / name / path).write_bytes(data)
