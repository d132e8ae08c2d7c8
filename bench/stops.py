"""What it costs to be ready for a signal, and how long all ranks take from the signal to a durable state.

A job of four ranks steps with ``on_signal`` and without it, in turns. Then one rank gets the signal in the middle of a
step, again and again: what counts is the time beyond that step and beyond the save itself. At last the job begins
again, as after a death: what its first step takes beyond the start of Python and PyTorch, for a state of a few bytes.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from dataclasses import replace

import shardfast as sf
import torch
from figures import Figures, median, ratio, spread, summary, table
from ranks import Settings, of_all, remove, run, turned

OFF, ON = "without", "with on_signal"
PROCESSES = 4
STEPS, BLOCK, STOPS, RESTARTS = 2000, 100, 20, 6
STEP_S = 5e-3


def measure(settings: Settings) -> Figures:
    settings = replace(settings, processes=PROCESSES)
    steps, calls, beyond = run(_worker, settings)
    restarts = [run(_restarted, settings) for _ in range(1 if settings.quick else RESTARTS)]
    ratios = ratio(steps[ON], steps[OFF])
    # Steps of ranks that share cores differ by more than the call takes: what it adds is looked for in itself.
    added = [on - off for on, off in zip(calls[ON], calls[OFF], strict=True)]
    longer = [1 + one / median(steps[OFF]) for one in added]
    rows = [[mode, f"{1e3 * median(steps[mode]):.4f} ms"] for mode in (OFF, ON)]
    rows.append(["with, of without", f"{median(ratios):.4f} {spread(ratios, 4)}"])
    rows += [[f"Checkpointer.step, {mode}", f"{1e6 * median(calls[mode]):.2f} us"] for mode in (OFF, ON)]
    rows.append(["a step with what that adds, of without", f"{median(longer):.5f} {spread(longer, 5)}"])
    rows.append(["from the signal, beyond step and save", f"{median(beyond):.1f} ms, at most {max(beyond):.1f}"])
    rows.append(["restore and first step, of nothing", f"{median(restarts):.0f} ms {spread(restarts, 0)}"])
    table(f"{PROCESSES} ranks, {len(ratios)} blocks of {BLOCK} steps, {len(beyond)} stops", ("", ""), rows)
    shutil.rmtree(settings.where / "restarts", ignore_errors=True)
    return {
        "ratios": summary(ratios),
        "longer": summary(longer),
        "beyond_ms": summary(beyond),
        "restart_ms": summary(restarts),
    }


def _worker(settings: Settings) -> tuple[dict[str, list[float]], dict[str, list[float]], list[float]]:
    """Seconds of a step and of the call in it, by block, and milliseconds of each stop."""
    state = {"model": {"w": torch.ones(1000)}}
    place = settings.where / "stops"
    kept = {
        OFF: sf.Checkpointer(place / "off", every=sf.steps(10**9)),
        ON: sf.Checkpointer(place / "on", every=sf.steps(10**9), on_signal="SIGUSR1"),
    }
    steps: dict[str, list[float]] = {OFF: [], ON: []}
    calls: dict[str, list[float]] = {OFF: [], ON: []}
    made = 0
    for number in range((200 if settings.quick else STEPS) // BLOCK):
        for mode in turned([OFF, ON], number):
            torch.distributed.barrier()
            in_call, began = [], time.perf_counter()
            for _ in range(BLOCK):
                torch.distributed.all_reduce(torch.ones(1000))
                made += 1
                called = time.perf_counter()
                kept[mode].step(made, state)
                in_call.append(time.perf_counter() - called)
            steps[mode].append((time.perf_counter() - began) / BLOCK)
            # Without the times in which another rank had the core.
            calls[mode].append(median(in_call))
    for ckpt in kept.values():
        ckpt.close()
    beyond = [_stopped(place / f"{number}", state, number) for number in range(3 if settings.quick else STOPS)]
    remove(place)
    without_first = [{mode: of[1:] for mode, of in times.items()} for times in (steps, calls)]
    return *without_first, beyond[1:]


def _restarted(settings: Settings) -> float:
    """Milliseconds until the slowest rank has made its first step."""
    state = {"model": {"w": torch.ones(1000)}}
    torch.distributed.barrier()
    began = time.perf_counter()
    ckpt = sf.Checkpointer(settings.where / "restarts", every=sf.steps(1), keep=sf.last(2))
    ckpt.step(ckpt.restore(state) + 1, state)
    took = time.perf_counter() - began
    ckpt.close()
    return max(of_all(1e3 * took))


def _stopped(place: os.PathLike[str], state: dict[str, object], number: int) -> float:
    """Milliseconds from the first call of step behind the signal until all ranks have returned, without the save's."""
    dice = random.Random(number)
    told = dice.randrange(PROCESSES)
    rank = torch.distributed.get_rank()
    ckpt = sf.Checkpointer(place, every=sf.steps(10**9), on_signal="SIGUSR1")
    signalled, called = [0.0], 0.0

    def tell() -> None:
        signalled[0] = time.perf_counter()
        os.kill(os.getpid(), signal.SIGUSR1)

    step, first_call = 0, {}
    while not ckpt.stopping:
        torch.distributed.all_reduce(torch.ones(1000))
        if step == 10 and rank == told:
            threading.Timer(dice.random() * STEP_S, tell).start()
        time.sleep(STEP_S)
        step += 1
        called = time.perf_counter()
        first_call[step] = called
        ckpt.step(step, state)
    returned = time.perf_counter()
    assert ckpt.report is not None
    saved_s = ckpt.report["phases_ms"]["committed"] / 1e3
    # The clock is the same for all processes of a machine.
    at = max(of_all(signalled[0]))
    first = min(call for call in first_call.values() if call >= at)
    ckpt.close()
    return max(of_all(1e3 * (returned - first - saved_s)))
