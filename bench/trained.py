"""Saves and loads of objects that train, by turns: engines and trainers, with our checkpoints and with their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from figures import OURS, Figures, median, ours_first, ratio, spread, summary, table
from ranks import Settings, drop_page_cache, in_turn, made, of_all, settle
from shardfast.capture.in_flight import in_flight

Digests = dict[str, bytes]
"""By name the SHA-256 of what must come back."""


class Trained(Protocol):
    """A model and its optimizer in training, saved and loaded in one way.

    Attributes:
        name: In the tables.
    """

    name: str

    def step(self) -> None:
        """Makes a step."""

    def save(self, place: Path) -> None:
        """Saves, as the training loop does; the loop is held as long as this takes."""

    def before_step(self) -> None:
        """Waits for what a step that follows at once waits for."""

    def finish(self, place: Path) -> None:
        """Waits until the save is durable, or makes it so."""

    def load(self, place: Path) -> float:
        """Loads, on all ranks at once; the seconds of it."""

    def digests(self) -> Digests:
        """Of what is here."""

    def close(self) -> None:
        """Frees the memory."""


Maker = Callable[[int], Trained]
"""Makes one from a seed."""


class _Named(NamedTuple):
    name: str


def saves_of(makers: Mapping[str, Maker], settings: Settings, failed: dict[str, str]) -> dict[str, list[list[float]]]:
    """By name, of each measured save the slowest rank's call, the wait of a step at once, and time until durable.

    Saves alternate between objects that stay. One that fails goes into ``failed`` with the reason.

    Raises:
        RuntimeError: One of ours failed.
    """
    found: dict[str, list[list[float]]] = {}

    def one(trained: Trained, path: Path, is_measured: bool) -> None:
        trained.step()
        settle(settings)
        dist.barrier()
        began = time.perf_counter()
        trained.save(path)
        called = time.perf_counter()
        trained.before_step()
        in_flight.staged()
        waited = time.perf_counter()
        trained.finish(path)
        dist.barrier()
        ended = time.perf_counter()
        took = of_all((called - began, waited - called, ended - began))
        if is_measured:
            found.setdefault(trained.name, []).append([max(times) for times in zip(*took, strict=True)])

    objects, missing = made({name: lambda maker=maker: maker(0) for name, maker in makers.items()})
    failed |= missing
    order = list(objects)
    in_turn(order, failed, settings, one, rounds=settings.rounds)
    for trained in objects:
        trained.close()
    return expect_ours({name: of for name, of in found.items() if name not in failed}, failed)


def loads_of(
    makers: Mapping[str, Maker], places: Mapping[str, Path], settings: Settings, failed: dict[str, str]
) -> tuple[dict[str, list[float]], dict[str, Digests]]:
    """By name the seconds of cold loads into new objects, and the digests of what each of them saved before.

    What was saved stays in ``places``. Each load is compared with it. One that fails goes into ``failed``.

    Raises:
        RuntimeError: One of ours failed.
    """
    digests: dict[str, Digests] = {}
    seconds: dict[str, list[float]] = {}

    def save(named: _Named, path: Path, is_measured: bool) -> None:
        trained = makers[named.name](0)
        for _ in range(2):
            trained.step()
        digests[named.name] = trained.digests()
        trained.save(places[named.name])
        trained.finish(places[named.name])
        trained.close()

    def load(named: _Named, path: Path, is_measured: bool) -> None:
        trained = makers[named.name](5)
        drop_page_cache(places[named.name])
        took = max(of_all(trained.load(places[named.name])))
        expect(trained, digests[named.name])
        trained.close()
        if is_measured:
            seconds.setdefault(named.name, []).append(took)

    order = [_Named(name) for name in makers]
    in_turn(order, failed, replace(settings, quick=True), save, rounds=1)
    in_turn(order, failed, settings, load, rounds=settings.rounds)
    return expect_ours({name: of for name, of in seconds.items() if name not in failed}, failed), digests


def expect(trained: Trained, digests: Digests) -> None:
    """Compares what is here with what was saved."""
    found = trained.digests()
    if found != digests:
        other = sorted(name for name in {*found, *digests} if found.get(name) != digests.get(name))
        raise AssertionError(f"{trained.name} loaded other bytes into {len(other)} of {len(found)}: {other[:3]}")


def expect_ours(found: dict[str, Any], failed: dict[str, str]) -> dict[str, Any]:
    """Gives back what was found if no way of ours failed."""
    if any(name.split(",")[0] == OURS for name in failed):
        raise RuntimeError(f"what is to be measured fails: {failed}")
    return found


def show_saves(found: dict[str, Any], size: int, *, stall: str, durable: str, processes: int) -> Figures:
    """By stage and system: its stall and its durable save, and how many times ours these take, round by round.

    Args:
        found: What the ranks measured.
        size: Bytes of the state.
        stall: The way of ours whose stalls are compared.
        durable: The way of ours whose durable saves are.
        processes: The number of ranks.
    """
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for stage, systems in found.items():
        stalls = {name: [call * 1e3 for call, _, _ in of] for name, of in systems.items()}
        totals = {name: [total for _, _, total in of] for name, of in systems.items()}
        figures[stage] = {}
        for name, of in ours_first(systems):
            times_stall = ratio(stalls[name], stalls[stall])
            times_total = ratio(totals[name], totals[durable])
            waits = [wait * 1e3 for _, wait, _ in of]
            rows.append([
                stage, name, f"{median(stalls[name]):.1f}", spread(stalls[name], 1), f"{median(times_stall):.1f}",
                spread(times_stall, 1), f"{median(waits):.1f}", median(totals[name]), spread(totals[name]),
                median(times_total), spread(times_total),
            ])  # fmt: skip
            figures[stage][name] = {
                "stall_ms": summary(stalls[name]),
                "step_at_once_ms": summary(waits),
                "durable_s": summary(totals[name]),
                "stall_of_ours": summary(times_stall),
                "durable_of_ours": summary(times_total),
            }
    columns = (
        "stall ms", "(min .. max)", f"of {stall}'s", "(min .. max)", "a step at once waits ms", "durable s",
        "(min .. max)", f"of {durable}'s", "(min .. max)",
    )  # fmt: skip
    title = f"saves of {size / 1e9:.2f} GB on {processes} processes, of the slowest rank"
    table(title, ("", "", *columns), rows)
    return figures


def show_loads(found: dict[str, dict[str, list[float]]], size: int, how: str, processes: int) -> Figures:
    """By stage and system: the seconds of its cold loads, and how many times ours these are."""
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for stage, systems in found.items():
        figures[stage] = {}
        for name, seconds in ours_first(systems):
            times = ratio(seconds, systems[OURS])
            rows.append([stage, name, median(seconds), spread(seconds), median(times), spread(times)])
            figures[stage][name] = {"seconds": summary(seconds), "of_ours": summary(times)}
    columns = ("s", "(min .. max)", f"of {OURS}'s", "(min .. max)")
    title = f"cold loads of {size / 1e9:.2f} GB {how}, on {processes} processes"
    table(title, ("", "", *columns), rows)
    return figures


def show_memory(found: dict[str, dict[str, int]], budget_bytes: int) -> Figures:
    """By stage and system: the memory of the rank that needs most in a save."""
    systems = list(dict.fromkeys(name for of in found.values() for name in of))
    rows = [
        [name, *(f"{of[name] / (1 << 20):.0f}" if name in of else "-" for of in found.values())] for name in systems
    ]
    title = f"peak memory of a rank in a save, above what was there before; the budget is {budget_bytes >> 20} MiB"
    table(title, ("", *(f"{stage} MiB" for stage in found)), rows)
    return {"bytes": found, "budget_bytes": budget_bytes}
