"""The position in a Lightning training's data: torchdata's loaders, others with a state, batches that were read ahead.

Private names of Lightning 2.6 that are used: ``trainer.fit_loop`` with ``_combined_loader``, ``_data_fetcher`` (its
``batches``, ``length`` and ``done``), ``restarting``, ``epoch_progress`` and ``epoch_loop.batch_progress``; of
torchdata 0.11, which need not be there, a loader's ``_iterator`` and ``_iterator_finished`` in its state.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:  # then no loader is one
    StatefulDataLoader = ()

import shardfast as sf

_log = logging.getLogger("shardfast")

LOADERS = "dataloader"
PREFETCHED = "prefetched"


def is_stateful(loader: Any) -> bool:
    """Whether a loader has a position, as Lightning asks."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


class End(NamedTuple):
    """The position at the end of a training, after which Lightning resets its loaders.

    Attributes:
        loaders: Those of torchdata, with their states.
        batches: What Lightning had read and not trained with.
    """

    loaders: list[tuple[Any, dict[str, Any]]]
    batches: list[Any] | None

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        """Sets the loaders back to it meanwhile; they begin anew afterwards, as Lightning has it."""
        for loader, state in self.loaders:
            loader.load_state_dict(state)
        try:
            yield
        finally:
            for loader, _ in self.loaders:
                loader.load_state_dict({})
                loader.next_iter_state = None


class Position:
    """The position in the training data.

    Args:
        trainer: Lightning's.
        index: Which piece of the data this rank reads.
        count: The number of pieces.
    """

    def __init__(self, trainer: Any, index: int, count: int) -> None:
        self._loop = trainer.fit_loop
        self._piece = index, count

    @property
    def _loaders(self) -> list[Any]:
        combined = self._loop._combined_loader
        return [] if combined is None else [one for one in combined.flattened if is_stateful(one)]

    def end(self) -> End | None:
        """Returns what Lightning is about to forget at the end of a training; ``None`` if none runs."""
        if self._loop._data_fetcher is None:
            return None
        loaders = [one for one in self._loaders if isinstance(one, StatefulDataLoader) and one._iterator is not None]
        return End([(one, one.state_dict()) for one in loaders], self._read_ahead())

    def to_save(self, end: End | None) -> dict[str, Any]:
        """Entries of the state: the loaders, and the batches that Lightning has read and not trained with.

        Args:
            end: What a training that has ended had.
        """
        if not self._loaders:
            return {}
        state: dict[str, Any] = {LOADERS: {str(at): self._of(one) for at, one in enumerate(self._loaders)}}
        batches = self._read_ahead() if end is None else end.batches
        if batches is not None:
            units = [{"batch": list(batch)} for batch in batches]
            state[PREFETCHED] = self._of({"replicated": None, "units": units})
        return state

    def _read_ahead(self) -> list[Any] | None:
        """The batches that Lightning has read to see whether there are more; ``None`` if it needs not."""
        fetcher = self._loop._data_fetcher
        is_ahead = fetcher is not None and fetcher.length is None and hasattr(fetcher, "batches")
        return list(fetcher.batches) if is_ahead else None

    def _of(self, value: object) -> sf.Sharded:
        index, count = self._piece
        return sf.Sharded(value, index, count)

    @property
    def is_inside_an_epoch(self) -> bool:
        """Whether Lightning goes on in an epoch that has batches left."""
        return bool(self._loop.restarting) and not self._loop.epoch_loop.batch_progress.is_last_batch

    def set_epoch(self, loader: Any) -> None:
        """Tells samplers the epoch, as Lightning does after it has made the iterators: torchdata's ask at once."""
        done = self._loop.epoch_progress.current
        is_ended = self._loop.epoch_loop.batch_progress.is_last_batch and done.ready > done.processed
        samplers: tuple[Any, ...] = (
            getattr(loader, "sampler", None),
            getattr(getattr(loader, "batch_sampler", None), "sampler", None),
        )
        for sampler in samplers:
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(done.processed + is_ended)

    def load(self, url: str, at: int, loader: Any) -> None:
        """Loads a loader's position, before Lightning makes its iterator."""
        sf.load(url, {LOADERS: {str(at): self._of(loader)}}, only=f"{LOADERS}/{at}")

    def put_back(self, url: str) -> None:
        """Gives Lightning the batches that it had read, after it made the iterator."""
        there = self._of({"replicated": None, "units": []})
        sf.load(url, {PREFETCHED: there}, only=PREFETCHED)
        fetcher = self._loop._data_fetcher
        value: Any = there.value
        fetcher.batches[:0] = [tuple(unit["batch"]) for unit in value["units"]]
        fetcher.done = fetcher.done and not fetcher.batches


class Resumption:
    """The part of a load that waits for the training's loaders, which Lightning makes later.

    Args:
        url: The checkpoint.
        names: Those of its values.
    """

    def __init__(self, url: str, names: Sequence[str]) -> None:
        self._url = url
        self._loaders = len({name.partition(".piece.")[0] for name in names if name.startswith(f"{LOADERS}/")})
        self._has_batches = any(name.startswith(f"{PREFETCHED}/") for name in names)
        self._met = 0
        self._is_inside: bool | None = None

    def meet(self, loader: Any, position: Position) -> None:
        """Loads the position of the next loader of the training, before its iterator is made."""
        if self._is_inside is None:  # Lightning's loop forgets it before the training starts
            self._is_inside = position.is_inside_an_epoch
        if not is_stateful(loader):
            return
        position.set_epoch(loader)
        if self._met < self._loaders:
            if self._is_inside:
                position.load(self._url, self._met, loader)
            elif isinstance(loader, StatefulDataLoader):
                self._end_epoch(loader, position)
        self._met += 1

    def _end_epoch(self, loader: Any, position: Position) -> None:
        """Has a loader's generators go on where an epoch ended, whose iterator the saved training still had."""
        try:
            position.load(self._url, self._met, loader)
        except sf.Invalid as error:  # other pieces; nothing of the next epoch is read yet
            _log.warning("the next epoch's order of samples is drawn anew: %s", error)
            return
        if not loader.state_dict().get("_iterator_finished"):  # this makes the iterator
            iter(loader)  # hands it out, so that Lightning gets the next one
        sf.load(self._url, {"random": sf.random_state()}, only="random", per_rank="index")

    def end(self, position: Position) -> None:
        """Loads what is behind the iterators that were made.

        Raises:
            Invalid: There were other loaders.
        """
        if not self._is_inside:
            return  # the next epoch's iterators draw from the generators, in the training that was saved, too
        if self._met != self._loaders:
            raise sf.Invalid(
                f"{self._url} has positions of {self._loaders} training loaders, {self._met} of those here have "
                "state_dict() and load_state_dict(): expected as many"
            )
        if self._has_batches:
            position.put_back(self._url)
        sf.load(self._url, {"random": sf.random_state()}, only="random", per_rank="index")
