"""Checkpoints of an invented later version: this reader takes what it understands, and refuses the rest by name."""

from __future__ import annotations

import pathlib

import pytest
import shardfast_objects as objects
import shardfast_reader as reader
import write_later

REFUSED = {
    "unknown-feature": (objects.Unsupported, r"delta>=1\.3"),
    "codec-column": (objects.Unsupported, r"column 'regions\.codec'"),
    "compressed": (objects.Unsupported, r"codec>=1\.4 delta>=1\.3"),
    "stored-bytes": (objects.Corrupt, r"model/w.*stored_bytes=12"),
    "file-elsewhere": (objects.Unsupported, r"files-elsewhere>=1\.5"),
    "file-elsewhere-unannounced": (
        objects.Unsupported,
        r"model/00000-000-\w+\.safetensors lies in '\.\./step-00000900'",
    ),
}


def on_disk(directory: pathlib.Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def test_the_checkpoints_are_those_of_the_program_beside_them() -> None:
    assert {path.name for path in write_later.LATER.iterdir()} == write_later.CHECKPOINTS.keys()
    assert write_later.CHECKPOINTS.keys() == {"readable", *REFUSED}
    for name, later in write_later.CHECKPOINTS.items():
        assert on_disk(write_later.LATER / name) == write_later.files(later), name


def test_a_later_version_without_anything_to_know_is_read() -> None:
    checkpoint = reader.Checkpoint(write_later.LATER / "readable")
    assert checkpoint.commit.version == checkpoint.manifest.version == (1, 7)
    assert checkpoint.tensor("model", "w") == 2 * write_later.HALF
    assert checkpoint.value("extra", "args", 0) == {"lr": 0.1}
    assert checkpoint.verify() == 2 * len(write_later.HALF) + len(write_later.VALUE)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_misread_is_refused_by_name(name: str) -> None:
    error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        reader.Checkpoint(write_later.LATER / name)
