"""The independent reader, held to the specification's own worked example."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import pathlib
import re
import struct
import uuid
from typing import Any

import pytest
import shardfast_objects as objects
import shardfast_reader as reader

SPECIFICATION = pathlib.Path(__file__).parents[2] / "docs" / "format.md"
ATTEMPT = "0123456789abcdef"
MANIFEST = f"manifest-{ATTEMPT}"


def example() -> dict[str, bytes]:
    """The files of the worked example, put together from the page."""
    _, text = SPECIFICATION.read_text().split("\n## 12. A worked example\n")
    blocks = dict(re.findall(r"\n```\w+ ([^\n]+)\n(.*?)\n```", text, re.DOTALL))
    files = {"COMMIT": (blocks.pop("COMMIT") + "\n").encode()}
    for name in {block.split()[0] for block in blocks}:
        head = blocks[f"{name} header"].replace("\n", "").encode()
        align = 8 if name == MANIFEST else 4096
        size = -(-(8 + len(head)) // align) * align
        files[name] = struct.pack("<Q", size - 8) + head.ljust(size - 8) + bytes.fromhex(blocks[f"{name} data"])
    return files


def write(directory: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    """Writes files under a directory."""
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def open_all(directory: pathlib.Path) -> int:
    """Proves everything there is."""
    return reader.Checkpoint(directory).verify()


def test_the_check_values() -> None:
    assert reader.crc64(b"123456789") == 0xAE8B14860A799888
    assert reader.crc64(b"") == 0


def test_the_example_reads(tmp_path: pathlib.Path) -> None:
    checkpoint = reader.Checkpoint(write(tmp_path, example()))
    leaves = [str(leaf) for leaf in checkpoint.leaves]
    assert leaves == ["extra/args: object", "model/tied: alias", "model/w: F32 [2, 3]"]
    assert struct.unpack("<6f", checkpoint.tensor("model", "w")) == (0, 1, 2, 3, 4, 5)
    assert checkpoint.tensor("model", "tied") == checkpoint.tensor("model", "w")
    for rank in range(2):
        assert checkpoint.value("extra", "args", rank) == {"lr": 0.1, "betas": (0.5, 1.0)}
    with pytest.raises(KeyError):
        checkpoint.value("extra", "args", 2)
    assert (checkpoint.manifest.step, checkpoint.manifest.world) == (1000, 2)
    assert checkpoint.manifest.user == {"note": "an example"}
    assert checkpoint.leaf("model", "w").layout == "mesh(dp=2) [Shard(0)]"
    assert checkpoint.verify() == 12 + 12 + 41


def test_every_flipped_bit_of_the_record_is_caught() -> None:
    record = example()["COMMIT"]
    reader.parse_commit(record)
    for bit in range(len(record) * 8):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(objects.Corrupt):
            reader.parse_commit(bytes(damaged))


def test_damage_anywhere_is_caught(tmp_path: pathlib.Path) -> None:
    files = example()
    write(tmp_path, files)
    assert open_all(tmp_path) == 65
    for name, data in files.items():
        # Every byte of the data and of the record, a sample of the rest.
        for at in [*range(0, len(data), 97), *range(max(0, len(data) - 41), len(data))]:
            damaged = bytearray(data)
            damaged[at] ^= 1 << at % 8
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(objects.Corrupt):
                open_all(tmp_path)
        for cut in (b"", data[:-1], data[: len(data) // 2], data + b"\0"):
            (tmp_path / name).write_bytes(cut)
            with pytest.raises(objects.Corrupt):
                open_all(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError):
            open_all(tmp_path)
        (tmp_path / name).write_bytes(data)
    first, second = sorted(name for name in files if name.startswith("model/"))
    (tmp_path / first).write_bytes(files[second])
    with pytest.raises(objects.Corrupt):
        open_all(tmp_path)


def signed(body: str) -> bytes:
    """A record with a right CRC."""
    return f"{body}crc64 {reader.crc64(body.encode()):016x}\n".encode()


def test_versions_of_records() -> None:
    body = example()["COMMIT"].decode().rpartition("crc64")[0]
    with pytest.raises(objects.Unsupported, match=r"2\.3"):
        reader.parse_commit(signed("shardfast 2.3\nno more is known\n"))
    later = body.replace("shardfast 1.0", "shardfast 1.4") + "colour blue\n"
    assert reader.parse_commit(signed(later)).version == (1, 4)
    zero = body.replace("manifest_bytes ", "manifest_bytes 0")
    for odd in (body + "colour blue\n", zero, body.replace("\n", "\r\n")):
        with pytest.raises(objects.Corrupt):
            reader.parse_commit(signed(odd))


def tampered(column: str, row: int, value: int) -> bytes:
    """The example's manifest with one row of a column replaced."""
    data = bytearray(example()[MANIFEST])
    stored = reader.parse_container("manifest", data, len(data)).tensors[column]
    width = reader.ITEM_BYTES[stored.dtype]
    at = stored.span[0] + row * width
    data[at : at + width] = value.to_bytes(width, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [
        ("regions.file_offset", 0, 4095),
        ("regions.file_offset", 0, 2**64 - 12),
        ("regions.file", 0, 3),
        ("regions.bytes", 0, 11),
        ("regions.stored_bytes", 0, 11),
        ("regions.stored_bytes", 1, 2**64 - 1),
        ("values.bytes", 0, 40),
        ("values.stored_bytes", 0, 40),
        ("values.stored_bytes", 0, 0),
        ("files.location", 2, 8),
        ("files.location", 2, 2**32 - 1),
        ("regions.offsets", 2, 0),
        ("regions.offsets", 2, 2),
        ("regions.lengths", 0, 0),
        ("values.bytes", 0, 42),
        ("ranks.stop", 0, 3),
        ("ranks.stop", 0, 0),
        ("leaves.alias_of", 1, 0),
        ("leaves.alias_of", 1, 1),
        ("leaves.alias_of", 1, 3),
        ("leaves.alias_of", 2, 1),
        ("leaves.name", 1, 5),
        ("leaves.key", 0, 4),
        ("leaves.name", 0, 7),
        ("leaves.dims_end", 0, 1),
        ("leaves.regions_end", 2, 1),
        ("strings.ends", 6, 41),
        ("shapes", 0, 3),
        ("files.data_start", 0, 0),
        ("files.data_start", 0, 8192),
        ("files.paths", 0, ord("/")),
    ],
)
def test_manifests_that_contradict_themselves(column: str, row: int, value: int) -> None:
    with pytest.raises(objects.Corrupt):
        reader.Manifest(tampered(column, row, value))


def test_what_a_later_version_brings() -> None:
    for column, row in (("leaves.kind", 0), ("leaves.dtype", 2)):
        with pytest.raises(objects.Unsupported):
            reader.Manifest(tampered(column, row, 99))
    with pytest.raises(objects.Unsupported, match="lies in 'model'"):
        reader.Manifest(tampered("files.location", 2, 4))
    data = example()[MANIFEST]
    reader.Manifest(data.replace(b'"shardfast.format":"1.0"', b'"shardfast.format":"1.9"'))
    with pytest.raises(objects.Unsupported):
        reader.Manifest(data.replace(b'"shardfast.format":"1.0"', b'"shardfast.format":"2.0"'))


@pytest.mark.parametrize(
    ("requires", "error"),
    [
        ("", None),
        (None, objects.Corrupt),
        ("codec>=1.4", objects.Unsupported),
        ("a-1>=1.4 b>=4.0", objects.Unsupported),
        (" ", objects.Corrupt),
        ("codec", objects.Corrupt),
        ("codec>=1.04", objects.Corrupt),
        ("codec>=1.4 ", objects.Corrupt),
        ("codec>=1.4,delta>=1.4", objects.Corrupt),
        ("Codec>=1.4", objects.Corrupt),
        ("b>=1.4 a>=1.4", objects.Corrupt),
        ("a>=1.4 a>=1.5", objects.Corrupt),
        ("a" * 65 + ">=1.4", objects.Corrupt),
    ],
)
def test_required_features(requires: str | None, error: type[Exception] | None) -> None:
    if error is None:
        reader.check_requires(requires)
    else:
        with pytest.raises(error):
            reader.check_requires(requires)


def _attributed() -> Any:
    made = collections.OrderedDict([(30, 1), ("a", 2)])
    vars(made).update(x=1, y=None)
    return made


# What the specification's table of tags says, as bytes and as Python has it.
VALUES: list[tuple[str, Any]] = [
    ("17", 23),
    ("3b7fffffffffffffff", -(2**63)),
    ("c249010000000000000000", 2**64),
    ("c349010000000000000000", -1 - 2**64),
    ("fb8000000000000000", -0.0),
    ("f5", True),
    ("62c3bc", "ü"),
    ("a2f6014201ff80", {None: 1, b"\x01\xff": []}),
    ("d9e10082016161", (1, "a")),
    ("d9e10182016161", {1, "a"}),
    ("d9e10282016161", frozenset({1, "a"})),
    ("d9e1034200ff", bytearray(b"\0\xff")),
    ("d9e10482fb3ff8000000000000fb8000000000000000", complex(1.5, -0.0)),
    ("d9e1054461edb3bf", "a\udcff"),
    ("d9e10683000a21", range(0, 10, -2)),
    ("d9e10783f603f6", slice(None, 3, None)),
    ("d9e108f6", ...),
    ("d9e109a2181e01616102", collections.OrderedDict([(30, 1), ("a", 2)])),
    ("d9e10ba2181e01616102", collections.Counter({30: 1, "a": 2})),
    ("d9e10c82088101", collections.deque([1], 8)),
    ("d9e1118269506f73697850617468692f646174612f72756e", pathlib.PurePosixPath("/data/run")),
    (
        "d9e112891907ea0b140c182218381a000c0a0800d9e1161ad693a400",
        datetime.datetime(
            2026, 11, 20, 12, 34, 56, 789000, datetime.timezone(datetime.timedelta(microseconds=3_600_000_000))
        ),
    ),
    ("d9e113831907ea0b14", datetime.date(2026, 11, 20)),
    ("d9e11583201a0001517f1a000f423f", datetime.timedelta(-1, 86399, 999999)),
    ("d9e11764312e3130", decimal.Decimal("1.10")),
    ("d9e118822003", fractions.Fraction(-1, 3)),
    ("d9e11950000102030405060708090a0b0c0d0e0f", uuid.UUID(bytes=bytes(range(16)))),
    ("d9e11a82656d6f64656c6177", objects.Tagged("tensor_ref", ["model", "w"])),
    ("d9e11b8465746f72636865696e74313681024401000200", objects.Tagged("array", ["torch", "int16", [2], b"\1\0\2\0"])),
    ("d9e1204480044e2e", objects.Tagged("pickle", b"\x80\x04N.")),
    ("d9e12182d9e109a2181e01616102a26178016179f6", _attributed()),
]


@pytest.mark.parametrize(("encoded", "value"), VALUES)
def test_values(encoded: str, value: Any) -> None:
    found = objects.decode_object(bytes.fromhex(encoded))
    assert type(found) is type(value)
    assert repr(found) == repr(value) or found == value
    assert getattr(found, "__dict__", None) == getattr(value, "__dict__", None)


@pytest.mark.parametrize(
    "encoded",
    [
        "",
        "f6f6",
        "f7",
        "f93c00",
        "fa3f800000",
        "9fff",
        "5fff",
        "62fffe",
        "9bffffffffffffffff",
        "82f6",
        "c201",
        "d9e100",
        "d9e10001",
        "d9e100d9e10080",
        "d9e1198101",
        "d9e11b84636a61786178810141ff",
        "d9e12182a0a0",
        "d9e12182d9e109a0a10102",
        "81" * 65 + "f6",
    ],
)
def test_objects_that_are_none(encoded: str) -> None:
    with pytest.raises(objects.Corrupt):
        objects.decode_object(bytes.fromhex(encoded))


def test_unknown_tags_are_unsupported() -> None:
    for number in (0, 258, 57_599, 57_600 + len(objects.TAGS)):
        with pytest.raises(objects.Unsupported):
            objects.decode_object(b"\xd9" + number.to_bytes(2, "big") + b"\xf6")


def test_the_readers_tables_are_those_of_the_page() -> None:
    page = SPECIFICATION.read_text()
    tags = re.findall(r"^\| (\d{5}) \| `(\w+)` \|", page, re.MULTILINE)
    assert tags == [(str(objects.FIRST_TAG + i), tag[0]) for i, tag in enumerate(objects.TAGS)]
    dtypes = re.findall(r"^\| (\d+) \| `(\w+)` \| (\d) \|", page, re.MULTILINE)
    assert dtypes == [(str(i), name, str(size)) for i, (name, size) in enumerate(reader.DTYPES)]
    columns = re.findall(r"^\| `([\w.]+)` \| (U\d+) \|", page, re.MULTILINE)
    assert dict(columns) == reader.COLUMNS
