"""Places of Lightning's checkpoints: what a path means, how one is replaced, and when one is removed.

``epoch=0-step=10.ckpt`` becomes a directory with a checkpoint in it. A path that a ``ModelCheckpoint`` may not use
twice exists once its save begins, since Lightning counts versions by the paths that exist. Any other one is saved
beside it, in ``.NAME.saving``, and gets its name once it is durable: so ``last.ckpt`` is never a half-written one.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import shardfast as sf

from .directories import begin, is_committed, is_ours, remove, state_of
from .places import absolute, is_far

_log = logging.getLogger("shardfast")


def directory(path: object) -> Path:
    """A path of Lightning's.

    Raises:
        Unsupported: It is in an object store.
    """
    place = os.fspath(path)  # type: ignore[call-overload]
    if is_far(place):
        raise sf.Unsupported(f"{place}: expected a directory; shardfast saves for Lightning to file systems only")
    return Path(absolute(place))


def saving(path: Path) -> Path:
    """Returns the place of a checkpoint that gets its name when it is durable."""
    return path.with_name(f".{path.name}.saving")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def prepare(path: Path, *, is_hidden: bool) -> None:
    """Makes the directory that a save needs. Rank 0 calls it, with no save to the same place in flight."""
    if not is_hidden:
        begin(path)
        return
    recover(path)
    if saving(path).exists():
        shutil.rmtree(saving(path))
    begin(saving(path))


def name(path: Path) -> None:
    """Gives a durable checkpoint its name; what had it goes. A process that dies in it leaves the rest to recover()."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        _forget(_replaced(path))
        path.rename(_replaced(path))
    saving(path).rename(path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    _forget(_replaced(path))


def recover(path: Path) -> None:
    """Names a checkpoint that was durable when its process died."""
    if is_committed(saving(path)):
        name(path)


def _forget(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def look(path: object) -> tuple[Path | None, list[str]]:
    """The directory of a checkpoint of ours and the names of its values, as rank 0 sees them; else no directory.

    Raises:
        NotFound: It was not saved to its end, and nothing stands in for it.
    """
    place = None if is_far(os.fspath(path)) else _found(directory(path))  # type: ignore[call-overload]
    if place is None:
        return None, []
    with sf.mapped(state_of(place)) as checkpoint:
        return place, list(checkpoint.value_names())


def _found(path: Path) -> Path | None:
    """The checkpoint of ours that a path means; ``None`` if Lightning wrote what is there.

    Raises:
        NotFound: It was not saved to its end, and nothing stands in for it.
    """
    recover(path)
    if not is_ours(path):
        return None
    if is_committed(path):
        return path
    siblings = [one for one in path.parent.iterdir() if is_committed(one) and not one.name.startswith(".")]
    newest = max(siblings, key=lambda one: (state_of(one) / "COMMIT").stat().st_mtime, default=None)
    if path.is_symlink() and newest is not None:  # save_last="link" names what is not durable yet
        _log.warning("%s names %s, which was not saved to its end: %s is loaded", path, path.resolve(), newest)
        return newest
    instead = f"the newest that was is {newest}" if newest is not None else f"there is no other one in {path.parent}"
    raise sf.NotFound(f"{path} was not saved to its end; {instead}")


class Removals:
    """Removals of checkpoints, each of which waits until the save that was begun before it is durable.

    Args:
        of_trainer: Removes what Lightning wrote.
    """

    def __init__(self, of_trainer: Callable[[Path], object]) -> None:
        self._of_trainer = of_trainer
        self._lock = threading.Lock()
        self._begun = self._durable = 0
        self._asked: dict[Path, int] = {}

    def begun(self, path: Path) -> int:
        """Counts a save, whose place is not removed any more; its number."""
        with self._lock:
            self._asked.pop(path, None)
            self._begun += 1
            return self._begun

    def durable(self, number: int) -> None:
        """Removes what waited for this save or an earlier one."""
        with self._lock:
            self._durable = max(self._durable, number)
            self._remove()

    def ask(self, path: Path) -> None:
        """Removes a checkpoint, now or later."""
        with self._lock:
            self._asked[path] = self._begun
            self._remove()

    def _remove(self) -> None:
        for path in [path for path, number in self._asked.items() if number <= self._durable]:
            del self._asked[path]
            try:
                self._remove_one(path)
            except OSError as error:
                _log.warning("%s cannot be removed: %s", path, error)

    def _remove_one(self, path: Path) -> None:
        if saving(path).exists():
            shutil.rmtree(saving(path))  # of a save that failed
        if path.is_symlink():
            path.unlink()
        elif is_ours(path):
            remove([path])
        elif path.exists():
            self._of_trainer(path)
