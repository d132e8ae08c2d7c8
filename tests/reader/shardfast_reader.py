"""Reads Shardfast checkpoints with nothing but Python's standard library.

Written from ``docs/format.md`` alone, section by section, and slow on purpose: it exists so that somebody else's eyes
look at every checkpoint that the tests write. It proves whatever it returns.

    checkpoint = Checkpoint("runs/gpt/step-00001000")
    for leaf in checkpoint.leaves: print(leaf)
    data = checkpoint.tensor("model", "layers.0.weight")    # bytes, row-major
    args = checkpoint.value("extra", "args", rank=0)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardfast_objects import Corrupt, Unsupported, decode_object, need

# --- Section 3: conventions -------------------------------------------------------------------------------------------


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x9A6C9329AC4BC9B5 if value & 1 else 0)
        table.append(value)
    return table


_CRC_TABLE = _crc_table()


def crc64(data: bytes) -> int:
    """CRC-64/NVME."""
    crc = 0xFFFFFFFFFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFFFFFFFFFF


def check_component(text: str, what: str) -> None:
    """A path component by section 3."""
    need(1 <= len(text.encode()) <= 200, f"{what} {text!r}: expected 1 to 200 bytes")
    need(text not in (".", ".."), f"{what} {text!r} would leave its directory")
    need(not re.search(r"[/\\\x00-\x1f\x7f-\x9f]", text), f"{what} {text!r} holds a forbidden character")


def check_key(text: str) -> None:
    """A key by section 3."""
    check_component(text, "key")
    need(not text.startswith((".", "manifest-")) and text != "COMMIT", f"key {text!r} is not allowed")


def decimal_number(text: str | None, what: str, limit: int = 2**64) -> int:
    """A decimal number in text, below ``limit``."""
    need(text is not None and re.fullmatch(r"0|[1-9][0-9]*", text) is not None, f"{what}: found {text!r}")
    number = int(text or "")
    need(number < limit, f"{what}: {number} is too large")
    return number


def hex_digits(text: str | None, count: int, what: str) -> str:
    """Exactly so many lowercase hexadecimal digits."""
    need(text is not None and re.fullmatch(rf"[0-9a-f]{{{count}}}", text) is not None, f"{what}: found {text!r}")
    return text or ""


# --- Section 6: COMMIT ------------------------------------------------------------------------------------------------


@dataclass
class Commit:
    """The record that makes a checkpoint exist."""

    version: tuple[int, int]
    attempt: str
    manifest: str
    manifest_bytes: int
    manifest_sha256: str


def parse_version(text: str | None, what: str) -> tuple[int, int]:
    """``<major>.<minor>``; another major version than 1 is unsupported."""
    major, dot, minor = (text or "").partition(".")
    need(dot == ".", f"{what}: expected <major>.<minor>, found {text!r}")
    version = decimal_number(major, what, 2**32), decimal_number(minor, what, 2**32)
    if version[0] != 1:
        raise Unsupported(f"{what}: expected version 1.x, found {text}; upgrade this reader")
    return version


def parse_commit(record: bytes) -> Commit:
    """Checks a record: its CRC, its version, then everything else."""
    need(len(record) <= 4096, f"COMMIT: expected at most 4096 bytes, found {len(record)}")
    frame = re.fullmatch(rb"(.*\n)crc64 ([0-9a-f]{16})\n", record, re.DOTALL)
    if frame is None:
        raise Corrupt("COMMIT: expected a last line with its CRC")
    need(crc64(frame[1]) == int(frame[2], 16), "COMMIT: its CRC does not match")
    try:
        lines = frame[1].decode().split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise Corrupt("COMMIT: expected text") from error
    need(lines[0].startswith("shardfast "), "COMMIT: expected shardfast in the first line")
    version = parse_version(lines[0].removeprefix("shardfast "), "COMMIT")
    names = ["attempt", "manifest", "manifest_bytes", "manifest_sha256"]
    need(len(lines) == 5 or (len(lines) > 5 and version[1] > 0), f"COMMIT: expected 6 lines, found {len(lines) + 1}")
    values = []
    for name, line in zip(names, lines[1:5], strict=True):
        need(line.startswith(name + " "), f"COMMIT: expected {name}, found {line!r}")
        values.append(line.removeprefix(name + " "))
    check_component(values[1], "manifest's name")
    return Commit(
        version,
        hex_digits(values[0], 16, "COMMIT: attempt"),
        values[1],
        decimal_number(values[2], "COMMIT: manifest_bytes"),
        hex_digits(values[3], 64, "COMMIT: manifest_sha256"),
    )


# --- Sections 7.1, 8.1, 8.2: the safetensors container ----------------------------------------------------------------

# By code: name and bytes of an element.
DTYPES = [
    ("BOOL", 1),
    ("U8", 1),
    ("I8", 1),
    ("F8_E5M2", 1),
    ("F8_E4M3", 1),
    ("F8_E8M0", 1),
    ("F8_E5M2FNUZ", 1),
    ("F8_E4M3FNUZ", 1),
    ("F4", 1),
    ("U16", 2),
    ("I16", 2),
    ("F16", 2),
    ("BF16", 2),
    ("U32", 4),
    ("I32", 4),
    ("F32", 4),
    ("U64", 8),
    ("I64", 8),
    ("F64", 8),
    ("C64", 8),
]
ITEM_BYTES = dict(DTYPES)


@dataclass
class Stored:
    """A tensor of a safetensors file; the span counts from the file's start."""

    dtype: str
    shape: list[int]
    span: tuple[int, int]


@dataclass
class Container:
    """A safetensors header."""

    data_start: int
    tensors: dict[str, Stored]
    metadata: dict[str, str]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    need(len(result) == len(pairs), "header: a name stands twice")
    return result


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**64


def parse_container(what: str, head: bytes, file_bytes: int) -> Container:
    """Checks a header; ``head`` is at least that, ``file_bytes`` the size of the whole file."""
    need(len(head) >= 8, f"{what}: too short")
    (length,) = struct.unpack_from("<Q", head)
    data_start = 8 + length
    need(length <= 100_000_000 and data_start <= min(len(head), file_bytes), f"{what}: a header of {length} bytes")
    text = head[8:data_start]
    need(text.startswith(b"{"), f"{what}: expected JSON")
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{what}: {error}") from error
    metadata = header.pop("__metadata__", {})
    need(isinstance(metadata, dict), f"{what}: __metadata__ is no object")
    need(all(isinstance(value, str) for value in metadata.values()), f"{what}: __metadata__ holds more than strings")
    tensors = {}
    for name, info in header.items():
        need(isinstance(info, dict) and info.keys() == {"dtype", "shape", "data_offsets"}, f"{what}: tensor {name!r}")
        dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
        need(isinstance(dtype, str), f"{what}: tensor {name!r}: dtype")
        need(isinstance(shape, list) and len(shape) <= 64 and all(map(_is_count, shape)), f"{what}: {name!r}: shape")
        need(isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets)), f"{what}: {name!r}")
        if dtype in ITEM_BYTES:
            size = math.prod(shape) * ITEM_BYTES[dtype]
            if dtype == "F4":
                need(size % 2 == 0, f"{what}: tensor {name!r} ends within a byte")
                size //= 2
            need(size == offsets[1] - offsets[0], f"{what}: tensor {name!r}: {dtype} {shape} in {offsets}")
        tensors[name] = Stored(dtype, shape, (data_start + offsets[0], data_start + offsets[1]))
    position = data_start
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].span):
        need(stored.span[0] == position <= stored.span[1], f"{what}: tensor {name!r} does not follow the one before")
        position = stored.span[1]
    need(position == file_bytes, f"{what}: expected {position} bytes, found {file_bytes}")
    return Container(data_start, tensors, metadata)


def parse_data_header(what: str, head: bytes, file_bytes: int) -> tuple[Container, list[int]]:
    """The header of a data file and the CRC of each of its blocks."""
    container = parse_container(what, head, file_bytes)
    need(container.data_start == len(head) and len(head) % 4096 == 0, f"{what}: data at {container.data_start}")
    for name, stored in container.tensors.items():
        if stored.dtype not in ITEM_BYTES:
            raise Unsupported(f"{what}: tensor {name!r} is of dtype {stored.dtype}")
        need(stored.dtype != "F4" or not stored.shape or stored.shape[-1] % 2 == 0, f"{what}: {name!r}: odd pairs")
        need(stored.dtype != "F4" or stored.shape != [], f"{what}: tensor {name!r}: half a byte")
    metadata = container.metadata
    need(metadata.get("format") == "pt", f"{what}: its metadata lack the format")
    block_bytes = decimal_number(metadata.get("shardfast.block_bytes"), f"{what}: shardfast.block_bytes")
    if block_bytes != BLOCK_BYTES:
        raise Unsupported(f"{what}: blocks of {block_bytes} bytes")
    blocks = -(-(file_bytes - container.data_start) // BLOCK_BYTES)
    digits = hex_digits(metadata.get("shardfast.blocks"), 16 * blocks, f"{what}: shardfast.blocks")
    return container, [int(digits[16 * i : 16 * i + 16], 16) for i in range(blocks)]


BLOCK_BYTES = 65_536


# --- Section 7: the manifest ------------------------------------------------------------------------------------------


@dataclass
class Extent:
    """A run of bytes in a data file."""

    file: int
    offset: int
    bytes: int
    stored_bytes: int


@dataclass
class DataFile:
    """A row of the table of files."""

    path: str
    location: int
    bytes: int
    data_start: int
    header_crc: int


@dataclass
class Part:
    """A region of a tensor and where it lies."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    extent: Extent


@dataclass
class Copy:
    """A value of an object, the ranks that saved it, and where it lies."""

    ranks: list[range]
    extent: Extent


@dataclass
class Leaf:
    """A row of the table of leaves, with what belongs to it."""

    key: str
    name: str
    layout: str
    kind: str
    dtype: str | None
    shape: tuple[int, ...]
    alias_of: int | None
    parts: list[Part]
    values: list[Copy]

    def __str__(self) -> str:
        what = f"{self.dtype} {list(self.shape)}" if self.kind == "tensor" else self.kind
        return f"{self.key}/{self.name}: {what}"


COLUMNS = {
    "files.paths": "U8",
    "files.path_ends": "U64",
    "files.location": "U32",
    "files.bytes": "U64",
    "files.data_start": "U64",
    "files.header_crc": "U64",
    "strings.text": "U8",
    "strings.ends": "U64",
    "leaves.key": "U32",
    "leaves.name": "U32",
    "leaves.layout": "U32",
    "leaves.kind": "U8",
    "leaves.dtype": "U8",
    "leaves.alias_of": "U32",
    "leaves.dims_end": "U64",
    "leaves.regions_end": "U64",
    "leaves.values_end": "U64",
    "shapes": "U64",
    "regions.offsets": "U64",
    "regions.lengths": "U64",
    "regions.file": "U32",
    "regions.file_offset": "U64",
    "regions.bytes": "U64",
    "regions.stored_bytes": "U64",
    "values.ranks_end": "U64",
    "values.file": "U32",
    "values.file_offset": "U64",
    "values.bytes": "U64",
    "values.stored_bytes": "U64",
    "ranks.start": "U32",
    "ranks.stop": "U32",
}
KINDS = ["tensor", "object", "alias"]


def check_requires(text: str | None) -> None:
    """The features that a reader must know: this one knows none."""
    if text == "":
        return
    need(text is not None, "manifest: shardfast.requires is missing")
    names = []
    for feature in (text or "").split(" "):
        found = re.fullmatch(r"([a-z][a-z0-9-]{0,63})>=([0-9]+\.[0-9]+)", feature)
        if found is None:
            raise Corrupt(f"manifest: shardfast.requires: found {text!r}")
        for number in found[2].split("."):
            decimal_number(number, "manifest: shardfast.requires", 2**32)
        names.append(found[1])
    need(all(a < b for a, b in itertools.pairwise(names)), f"manifest: shardfast.requires is not sorted: {text!r}")
    raise Unsupported(f"manifest: it requires {text}, and this reader knows no feature of a later version than 1.0")


class Manifest:
    """A checked manifest."""

    def __init__(self, data: bytes) -> None:
        container = parse_container("manifest", data, len(data))
        metadata = container.metadata
        self.version = parse_version(metadata.get("shardfast.format"), "manifest: shardfast.format")
        check_requires(metadata.get("shardfast.requires"))
        self.attempt = hex_digits(metadata.get("shardfast.attempt"), 16, "manifest: shardfast.attempt")
        self.world = decimal_number(metadata.get("shardfast.world"), "manifest: shardfast.world", 2**32)
        need(self.world > 0, "manifest: a world of no rank")
        self.created_unix_ms = decimal_number(metadata.get("shardfast.created_unix_ms"), "manifest: created_unix_ms")
        step = metadata.get("shardfast.step")
        self.step = None if step is None else decimal_number(step, "manifest: shardfast.step")
        need("shardfast.writer" in metadata, "manifest: the writer is missing")
        self.writer = metadata["shardfast.writer"]
        self.user = {key.removeprefix("user."): v for key, v in metadata.items() if key.startswith("user.")}
        self._columns = {name: self._column(container, data, name, dtype) for name, dtype in COLUMNS.items()}
        for name in container.tensors:
            if name not in COLUMNS and not name.startswith("info."):
                raise Unsupported(f"manifest: the column {name!r} is not known")
        self._strings = self._texts("strings.text", "strings.ends")
        self.files = self._files()
        self.leaves = self._leaves()

    @staticmethod
    def _column(container: Container, data: bytes, name: str, dtype: str) -> Sequence[int]:
        stored = container.tensors.get(name)
        if stored is None:
            raise Corrupt(f"manifest: the column {name} is missing")
        need(stored.dtype == dtype and len(stored.shape) == 1, f"manifest: {name}: {stored.dtype} {stored.shape}")
        part = data[stored.span[0] : stored.span[1]]
        code = {"U8": "B", "U32": "I", "U64": "Q"}[dtype]
        return part if dtype == "U8" else struct.unpack(f"<{stored.shape[0]}{code}", part)

    def _rows(self, *columns: str) -> int:
        counts = {len(self._columns[column]) for column in columns}
        need(len(counts) == 1, f"manifest: {columns} differ in their rows")
        return counts.pop()

    def _spans(self, ends: str, rows: int) -> list[range]:
        column = self._columns[ends]
        spans = [range(start, stop) for start, stop in itertools.pairwise([0, *column])]
        need(all(span.start <= span.stop for span in spans), f"manifest: column {ends} falls")
        need((column[-1] if column else 0) == rows, f"manifest: column {ends} does not end with {rows}")
        return spans

    def _texts(self, text: str, ends: str) -> list[str]:
        blob = bytes(self._columns[text])
        try:
            # Each piece by itself, so that no end may cut a character in two.
            return [blob[span.start : span.stop].decode() for span in self._spans(ends, len(blob))]
        except UnicodeDecodeError as error:
            raise Corrupt(f"manifest: column {text}: {error}") from error

    def _files(self) -> list[DataFile]:
        column = self._columns
        names = ("files.location", "files.bytes", "files.data_start", "files.header_crc")
        self._rows("files.path_ends", *names)
        paths = self._texts("files.paths", "files.path_ends")
        need(len(set(paths)) == len(paths), "manifest: a file stands twice")
        files = [DataFile(*row) for row in zip(paths, *(column[name] for name in names), strict=True)]
        for file in files:
            if file.location != 0:
                need(file.location <= len(self._strings), f"manifest: file {file.path}: no string {file.location - 1}")
                place = self._strings[file.location - 1]
                raise Unsupported(f"manifest: file {file.path} lies in {place!r}, not in the checkpoint")
            for component in file.path.split("/"):
                check_component(component, f"path {file.path!r}: component")
            sound = 0 < file.data_start <= min(file.bytes, 100_000_008) and file.data_start % 4096 == 0
            need(sound, f"manifest: file {file.path}: data at {file.data_start} of {file.bytes}")
        return files

    def _extents(self, table: str) -> list[Extent]:
        column = self._columns
        names = [f"{table}.{name}" for name in ("file", "file_offset", "bytes", "stored_bytes")]
        self._rows(*names)
        extents = [Extent(*row) for row in zip(*(column[name] for name in names), strict=True)]
        for extent in extents:
            need(extent.file < len(self.files), f"manifest: there is no file {extent.file}")
            file = self.files[extent.file]
            inside = file.data_start <= extent.offset and extent.offset + extent.stored_bytes <= file.bytes
            need(inside, f"manifest: {extent} is not inside the data of {file.path}")
        return extents

    def _leaves(self) -> list[Leaf]:
        column = self._columns
        count = self._rows(*(name for name in COLUMNS if name.startswith("leaves.")))
        strings = self._strings
        for name in ("leaves.key", "leaves.name", "leaves.layout"):
            need(all(i < len(strings) for i in column[name]), f"manifest: {name} names a string that is not there")
        extents, value_extents = self._extents("regions"), self._extents("values")
        dims = self._spans("leaves.dims_end", len(column["shapes"]))
        regions = self._spans("leaves.regions_end", len(extents))
        values = self._spans("leaves.values_end", len(value_extents))
        ranks = self._spans("values.ranks_end", self._rows("ranks.start", "ranks.stop"))
        need(len(ranks) == len(value_extents), "manifest: the columns of values differ in their rows")
        coordinates = self._rows("regions.offsets", "regions.lengths")
        position = 0
        leaves: list[Leaf] = []
        for i in range(count):
            shape = tuple(column["shapes"][row] for row in dims[i])
            need(len(shape) <= 64, f"manifest: leaf {i} has {len(shape)} dimensions")
            parts = []
            for row in regions[i]:
                bounds = slice(position, position + len(shape))
                offsets, lengths = column["regions.offsets"][bounds], column["regions.lengths"][bounds]
                parts.append(Part(tuple(offsets), tuple(lengths), extents[row]))
                position += len(shape)
                need(position <= coordinates, "manifest: column regions.offsets is too short")
            copies = []
            for row in values[i]:
                saved_by = [range(column["ranks.start"][r], column["ranks.stop"][r]) for r in ranks[row]]
                copies.append(Copy(saved_by, value_extents[row]))
            code, dtype = column["leaves.kind"][i], column["leaves.dtype"][i]
            if code >= len(KINDS):
                raise Unsupported(f"manifest: leaf {i} is of kind {code}")
            kind = KINDS[code]
            if kind == "tensor" and dtype >= len(DTYPES):
                raise Unsupported(f"manifest: leaf {i} is of dtype {dtype}")
            need(kind == "tensor" or dtype == 0, f"manifest: leaf {i} has a dtype")
            need(kind == "alias" or column["leaves.alias_of"][i] == 0, f"manifest: leaf {i} has a target")
            leaf = Leaf(
                key=strings[column["leaves.key"][i]],
                name=strings[column["leaves.name"][i]],
                layout=strings[column["leaves.layout"][i]],
                kind=kind,
                dtype=DTYPES[dtype][0] if kind == "tensor" else None,
                shape=shape,
                alias_of=column["leaves.alias_of"][i] if kind == "alias" else None,
                parts=parts,
                values=copies,
            )
            check_key(leaf.key)
            self._check_leaf(leaf)
            leaves.append(leaf)
        need(position == coordinates, "manifest: column regions.offsets is too long")
        names = [(leaf.key.encode(), leaf.name.encode()) for leaf in leaves]
        need(all(a < b for a, b in itertools.pairwise(names)), "manifest: leaves are not sorted and unique")
        for leaf in leaves:
            if leaf.alias_of is not None:
                sound = leaf.alias_of < count and leaves[leaf.alias_of].kind == "tensor"
                need(sound, f"{leaf}: its target is no tensor")
        return leaves

    def _check_leaf(self, leaf: Leaf) -> None:
        need(leaf.kind == "tensor" or not (leaf.shape or leaf.parts), f"{leaf}: has a shape or regions")
        need((leaf.kind == "object") == bool(leaf.values), f"{leaf}: values and kind do not go together")
        if leaf.dtype is not None:
            self._check_tensor(leaf, ITEM_BYTES[leaf.dtype])
        for extent in [part.extent for part in leaf.parts] + [copy.extent for copy in leaf.values]:
            need(extent.stored_bytes == extent.bytes, f"{leaf}: {extent} is not stored as it is")
        taken: list[range] = []
        for copy in leaf.values:
            need(bool(copy.ranks), f"{leaf}: a value was saved by no rank")
            need(all(a.stop <= b.start for a, b in itertools.pairwise(copy.ranks)), f"{leaf}: ranks do not ascend")
            need(all(r.start < r.stop <= self.world for r in copy.ranks), f"{leaf}: no ranks of this world")
            taken += copy.ranks
        firsts = [copy.ranks[0].start for copy in leaf.values]
        need(all(a < b for a, b in itertools.pairwise(firsts)), f"{leaf}: values are not sorted by rank")
        taken.sort(key=lambda ranks: ranks.start)
        need(all(a.stop <= b.start for a, b in itertools.pairwise(taken)), f"{leaf}: a rank has two values")

    @staticmethod
    def _check_tensor(leaf: Leaf, item_bytes: int) -> None:
        need(math.prod(leaf.shape) * item_bytes < 2**64, f"{leaf}: is too large")
        covered = 0
        for part in leaf.parts:
            numel = math.prod(part.lengths)
            inside = all(o + n <= s for o, n, s in zip(part.offsets, part.lengths, leaf.shape, strict=True))
            need(inside, f"{leaf}: the region {part} is not inside")
            need(numel > 0 or part.lengths == leaf.shape, f"{leaf}: an empty region")
            need(part.extent.bytes == numel * item_bytes, f"{leaf}: {part} is not {numel * item_bytes} bytes")
            covered += numel
        starts = [part.offsets for part in leaf.parts]
        need(all(a < b for a, b in itertools.pairwise(starts)), f"{leaf}: regions are not sorted and unique")
        need(covered == math.prod(leaf.shape), f"{leaf}: regions hold {covered} elements")


# --- Section 5: reading -----------------------------------------------------------------------------------------------


class Checkpoint:
    """A committed checkpoint in a directory, proven as far as it has been read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        with open(self.path / "COMMIT", "rb") as file:
            self.commit = parse_commit(file.read(4097))
        with open(self.path / self.commit.manifest, "rb") as file:
            data = file.read(self.commit.manifest_bytes + 1)
        need(len(data) == self.commit.manifest_bytes, f"{self.commit.manifest}: {len(data)} bytes")
        need(hashlib.sha256(data).hexdigest() == self.commit.manifest_sha256, f"{self.commit.manifest}: its SHA-256")
        self.manifest = Manifest(data)
        self.leaves = self.manifest.leaves
        self._headers: dict[int, list[int]] = {}

    def leaf(self, key: str, name: str) -> Leaf:
        """The leaf of that name."""
        for leaf in self.leaves:
            if (leaf.key, leaf.name) == (key, name):
                return leaf
        raise KeyError(f"{key}/{name}")

    def tensor(self, key: str, name: str) -> bytes:
        """The bytes of a tensor, or of the one that an alias stands for, in row-major order."""
        leaf = self.leaf(key, name)
        if leaf.alias_of is not None:
            leaf = self.leaves[leaf.alias_of]
        if leaf.dtype is None:
            raise TypeError(f"{leaf} is no tensor")
        item_bytes = ITEM_BYTES[leaf.dtype]
        whole = bytearray(math.prod(leaf.shape) * item_bytes)
        seen = bytearray(math.prod(leaf.shape))
        for part in leaf.parts:
            data = self._read(part.extent, str(leaf))
            run = math.prod(part.lengths[-1:]) if part.lengths else 1
            for i, start in enumerate(_runs(part, leaf.shape)):
                need(not any(seen[start : start + run]), f"{leaf}: element {start} is stored twice")
                seen[start : start + run] = b"\1" * run
                source = data[i * run * item_bytes : (i + 1) * run * item_bytes]
                whole[start * item_bytes : (start + run) * item_bytes] = source
        return bytes(whole)

    def value(self, key: str, name: str, rank: int) -> Any:
        """The value that a rank saved."""
        leaf = self.leaf(key, name)
        for copy in leaf.values:
            if any(rank in ranks for ranks in copy.ranks):
                return decode_object(self._read(copy.extent, str(leaf)))
        raise KeyError(f"{leaf}: rank {rank} saved no value")

    def verify(self) -> int:
        """Reads every block of every file and decodes every object; answers how many bytes of data were proven."""
        proven = 0
        for i, file in enumerate(self.manifest.files):
            size = file.bytes - file.data_start
            self._read(Extent(i, file.data_start, size, size), file.path)
            proven += size
        for leaf in self.leaves:
            if leaf.kind == "tensor":
                self.tensor(leaf.key, leaf.name)
            for copy in leaf.values:
                self.value(leaf.key, leaf.name, copy.ranks[0].start)
        return proven

    def _blocks(self, index: int) -> list[int]:
        if index not in self._headers:
            entry = self.manifest.files[index]
            size = os.path.getsize(self.path / entry.path)
            need(size == entry.bytes, f"{entry.path}: expected {entry.bytes} bytes, found {size}")
            with open(self.path / entry.path, "rb") as file:
                head = file.read(entry.data_start)
            need(crc64(head) == entry.header_crc, f"{entry.path}: its header's CRC does not match")
            self._headers[index] = parse_data_header(entry.path, head, entry.bytes)[1]
        return self._headers[index]

    def _read(self, extent: Extent, what: str) -> bytes:
        entry, crcs = self.manifest.files[extent.file], self._blocks(extent.file)
        first = (extent.offset - entry.data_start) // BLOCK_BYTES
        last = -(-(extent.offset + extent.stored_bytes - entry.data_start) // BLOCK_BYTES)
        data = bytearray()
        with open(self.path / entry.path, "rb") as file:
            for block in range(first, last):
                start = entry.data_start + block * BLOCK_BYTES
                file.seek(start)
                found = file.read(min(BLOCK_BYTES, entry.bytes - start))
                need(crc64(found) == crcs[block], f"{what}: {entry.path}: the block at byte {start} is damaged")
                data += found
        skip = extent.offset - entry.data_start - first * BLOCK_BYTES
        return bytes(data[skip : skip + extent.stored_bytes])


def _runs(part: Part, shape: tuple[int, ...]) -> Iterator[int]:
    """The index of the first element of each row of a region, in the whole tensor."""
    if 0 in part.lengths:
        return
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    outer = [range(o, o + n) for o, n in zip(part.offsets[:-1], part.lengths[:-1], strict=True)]
    last = part.offsets[-1] if part.offsets else 0
    for indices in itertools.product(*outer):
        yield sum(i * stride for i, stride in zip(indices, strides, strict=False)) + last


def main() -> None:
    """Lists and proves the checkpoints named on the command line."""
    for path in sys.argv[1:]:
        checkpoint = Checkpoint(path)
        for leaf in checkpoint.leaves:
            print(leaf)
        print(f"{path}: {checkpoint.verify()} bytes proven")


if __name__ == "__main__":
    main()
