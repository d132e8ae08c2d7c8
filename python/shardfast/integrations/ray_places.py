"""Places of checkpoints in Ray's storage: their URLs, the run's directory, and pins of those that Ray names."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from pyarrow.fs import FileSelector, FileSystem, FileType

import shardfast as sf

_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "az://"}
_PIN = ".pinned"
"""The mark of the format beside ``COMMIT``: no rule of ``keep=`` deletes this checkpoint."""

_NOTE = b"Ray names this checkpoint: "
"""Begins the note of such a pin."""

_NOTE_BYTES_MAX = 4096
"""Longest note that the command reads, in bytes."""

_STEP = r"step-([0-9]{8,})"


def url_of(filesystem: FileSystem, path: str) -> str:
    """Returns the URL of a path in one of pyarrow's file systems.

    Raises:
        Unsupported: It is a file system whose URLs Shardfast does not have.
    """
    scheme = _SCHEMES.get(filesystem.type_name)
    if scheme is None:
        raise sf.Unsupported(
            f"Ray's storage {path}: expected a path, or a URL of S3, Google Cloud Storage or Azure as "
            f"RunConfig.storage_path, found the file system {filesystem.type_name!r}"
        )
    if not scheme:
        return path
    return f"{scheme}{path.replace('%', '%25').replace('?', '%3F')}{_options_of(filesystem)}"


def _options_of(filesystem: FileSystem) -> str:
    """Options of S3 that say where the server is, if pyarrow knows it; credentials come from the environment."""
    if filesystem.type_name != "s3":
        return ""
    known = filesystem.__reduce__()[1][0]  # what pickle would make it from: it says its endpoint nowhere else
    endpoint = known["endpoint_override"]
    options = {
        "region": known["region"],
        "endpoint": endpoint and (endpoint if "://" in endpoint else f"{known['scheme']}://{endpoint}"),
    }
    return (
        "?" + "&".join(f"{name}={value}" for name, value in options.items() if value) if any(options.values()) else ""
    )


def run_of(call: str, url: str, filesystem: FileSystem, directory: str) -> str:
    """Returns the path, in Ray's file system, of the run at ``url``, which is below Ray's directory.

    Raises:
        Invalid: The run is elsewhere, or Ray's directory is the run's or below it.
    """
    ours, theirs = _plain(url), _plain(url_of(filesystem, directory))
    remedy = "pass shardfast.integrations.ray.run_url() to Checkpointer"
    if theirs.is_relative_to(ours):
        raise sf.Invalid(
            f"{call}: expected a run below {directory}, Ray's directory, found {url}, in which Ray keeps its own "
            f"files: {remedy}, or give RunConfig another storage_path"
        )
    if not ours.is_relative_to(theirs):
        raise sf.Invalid(f"{call}: expected a run below {directory}, Ray's directory, found {url}: {remedy}")
    return f"{directory}/{ours.relative_to(theirs)}"


def _plain(url: str) -> PurePosixPath:
    """The place that a URL means, without options and links."""
    if "://" in url and not url.startswith("file://"):
        return PurePosixPath(url.partition("?")[0])
    path = unquote(url.removeprefix("file://")) if url.startswith("file://") else url
    return PurePosixPath(Path(path).resolve())


def fresh(filesystem: FileSystem, path: str) -> str:
    """Returns this path, or the first of ``path-2``, ``path-3``, … at which nothing is."""
    number, found = 1, path
    while filesystem.get_file_info(found).type != FileType.NotFound:
        number += 1
        found = f"{path}-{number}"
    return found


def path_of_step(run: str, step: int) -> str:
    """Returns the path of the checkpoint of a step, by the format's names."""
    return f"{run}/step-{step:08d}"


def step_of(path: str) -> int:
    """Returns the step of a run's checkpoint by its path.

    Raises:
        Invalid: It is none.
    """
    found = re.fullmatch(_STEP, path.rpartition("/")[2])
    if found is None:
        raise sf.Invalid(f"{path}: expected a checkpoint of a run, <run>/step-<step>: Shardfast did not save it")
    return int(found[1])


def pin(filesystem: FileSystem, checkpoint: str, metrics: dict[str, Any]) -> None:
    """Pins a checkpoint that Ray names; the note has its metrics, if it can."""
    try:
        note = _NOTE + json.dumps(metrics, default=float).encode()
    except (TypeError, ValueError):
        note = _NOTE
    with filesystem.open_output_stream(f"{checkpoint}/{_PIN}") as stream:
        stream.write(note if len(note) <= _NOTE_BYTES_MAX else _NOTE)


def unpin(filesystem: FileSystem, checkpoint: str) -> None:
    """Removes the pin of a checkpoint."""
    filesystem.delete_file(f"{checkpoint}/{_PIN}")


def lost(filesystem: FileSystem, run: str, newest: int) -> list[tuple[str, dict[str, Any]]]:
    """Returns the checkpoints behind step ``newest`` that :func:`pin` has pinned, in order, with their metrics.

    Removes the pin of one that is not committed, or whose metrics are not in its note.
    """
    found = []
    for entry in sorted(filesystem.get_file_info(FileSelector(run, allow_not_found=True)), key=lambda one: one.path):
        if re.fullmatch(_STEP, entry.base_name) is None or step_of(entry.path) <= newest:
            continue
        mark, record = filesystem.get_file_info([f"{entry.path}/{_PIN}", f"{entry.path}/COMMIT"])
        if mark.type != FileType.File:
            continue
        with filesystem.open_input_stream(mark.path) as stream:
            note = stream.read()
        if record.type == FileType.File and note.startswith(_NOTE) and note != _NOTE:
            found.append((entry.path, json.loads(note.removeprefix(_NOTE))))
        elif note.startswith(_NOTE):
            unpin(filesystem, entry.path)
    return found
