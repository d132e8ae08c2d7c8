"""The checkpoint from which a run goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from . import native
from .errors import Error, Invalid
from .verbs import expect_step

_log = logging.getLogger("shardfast")

PEER = "peer "
"""How the sources of a checkpoint begin that are other machines' memory."""


def expect_asked(step: int, older: bool) -> None:
    """Refuses a step that is none, and one beside ``older``."""
    expect_step(step)
    if older:
        raise Invalid(f"restore(step={step}, older=True): expected one of them: a step names its checkpoint")


def expect_no_root(url: str) -> None:
    """Refuses the root of a file system as the directory of a run."""
    if url == "/" or url.endswith(("://", ":///")):
        raise Invalid(f"{url}: expected the directory of a run, found the root of the file system")


def expect_of(url: str, step: int, checkpoint: native.Checkpoint) -> None:
    """Refuses the checkpoint of another step under this one's name."""
    recorded = checkpoint.info["step"]
    if recorded not in (None, step):
        raise Invalid(
            f"{checkpoint.url}: expected the checkpoint of step {step}, found that of step {recorded}, which was "
            f"copied or renamed: move it to {native.step_url(url, recorded)}, or out of the run"
        )


def open_step(
    session: native.Session, url: str, near: str | None, step: int, timeout_s: float, after_s: float
) -> native.Checkpoint:
    """Opens the checkpoint of a step of the run, on the local disk if it is there."""
    if near is not None:
        found, _ = native.newest(
            session, url, near=near, older=False, below=step + 1, timeout_s=timeout_s, after_s=after_s
        )
        if found is not None and found[0] == step:
            return found[1]
    return native.open(session, native.step_url(url, step), timeout_s=timeout_s, after_s=after_s)


def say_unasked(url: str) -> None:
    """Warns if a keeper of this machine has the run in memory: without ``memory=`` the restore does not read it."""
    if native.keeper_process(native.memory_place(url)[0]) is not None:
        _log.warning(
            "%s: the keeper of this machine has this run in its memory, which is looked at only with memory=; "
            "`shardfast keeper status` tells what it has",
            url,
        )


def is_near_alone(checkpoint: native.Checkpoint) -> bool:
    """Whether it lies on the local disk or in memory, and not yet at the run's own place."""
    return levels_of(checkpoint) in (["local"], ["memory"])


def levels_of(checkpoint: native.Checkpoint) -> list[str]:
    """The places where it lies, the nearest first, without the machines that have it in memory."""
    return [name for name, _ in checkpoint.sources() if not name.startswith(PEER)]


def pass_over(checkpoint: native.Checkpoint, error: Error, lost: list[str] | None) -> list[str]:
    """Logs that a checkpoint is passed over. Returns it with those before it, if memory alone had all, else nothing."""
    _log.warning("passed over %s: %s", checkpoint.url, error)
    is_lost = lost is not None and levels_of(checkpoint) == ["memory"]
    return [*(lost or []), f"{checkpoint.url}: {error}"] if is_lost else []


def say_sources(checkpoint: native.Checkpoint) -> None:
    """Logs that a part of it did not prove where it is nearest."""
    sources = dict(checkpoint.sources())
    near = "on the local disk" if "local" in sources else "in memory" if "memory" in sources else None
    if near is not None and sources.get("url"):
        _log.warning(
            "%s: %d bytes of it did not prove %s, and were read from the run's own place",
            *(checkpoint.url, sources["url"], near),
        )


def say_nothing_restored(session: native.Session, url: str, skipped: Sequence[str]) -> None:
    """Logs on rank 0 that the training begins at step 0, and what the run has instead of a checkpoint."""
    if session.rank != 0:
        return
    if not skipped:
        _log.info("%s: no checkpoint there, so nothing is restored and the training begins at step 0", url)
        return
    _log.warning(
        "%s: nothing is restored and the training begins at step 0, though the run has %d step%s: the newest is %s",
        url,
        len(skipped),
        "s" if len(skipped) > 1 else "",
        skipped[0],
    )
