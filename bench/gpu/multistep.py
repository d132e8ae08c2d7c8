"""Time for which a save holds up the training on a device, by the number of steps over which it is captured.

One model, several batch sizes: the longer a step, the more of the copy it hides. `x` is the time of the copy in steps.
Every way to save trains in turns, some intervals of steps with a save in the middle of each, beside the same number of
steps without one. Saves of a turn end before the next turn. The law is that of decision 27.

    bench/gpu/run.sh --multistep                       # x from about 0.5 to 5
    bench/gpu/run.sh --multistep --batches 4 --intervals 200,50,10
    bench/gpu/run.sh --multistep --batches 4 --crash-every 600    # each way at its own best interval
    PYTHONPATH=bench python bench/gpu/multistep.py --batches 1,2,4,8 --where /mnt/nvme --json figures.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import shardfast as sf
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import Training, copy_ceilings, seconds
from results import (
    COLUMNS,
    CRASHED_COLUMNS,
    LAZY,
    QUIET,
    Crashed,
    Machine,
    Turns,
    best_steps,
    crashed_row,
    row,
    stalls,
    text_of,
)
from rivals import DcpAsync

KEPT = 4
"""Checkpoints that stay. When a training crashes, saves that end afterwards must not have removed the newest before."""


class Way:
    """A way to save; this one saves nothing. Steps count from 1; saves come behind steps that the interval divides."""

    def stepped(self, step: int) -> None:
        """Ends step ``step``."""

    def before_step(self) -> None:
        """Comes before each step of the optimizer."""

    def end(self) -> float | None:
        """Waits for saves under way; the seconds from the newest saved step to its commit, if the way tells."""

    def committed(self) -> int | None:
        """The newest step whose save is committed, without waiting; ``None`` before the first one."""

    def restore(self, step: int) -> None:
        """Begins again at a save of this step. Newer ones count as lost in the crash and are deleted before."""

    def close(self) -> None:
        """Ends the saves under way."""


class Ours(Way):
    """A ``Checkpointer`` whose saves are captured over so many steps."""

    def __init__(self, place: Path, training: Training, interval: int, over: int) -> None:
        self._place, self._training, self._interval, self._over = place, training, interval, over
        self._open()

    def _open(self) -> None:
        every = sf.steps(self._interval)
        over = min(self._over, self._interval)
        self.checkpointer = sf.Checkpointer(self._place, every=every, over=over, keep=sf.last(KEPT))

    def stepped(self, step: int) -> None:
        self.checkpointer.step(step, self._training.state)

    def end(self) -> float | None:
        self.checkpointer.wait()
        report = self.checkpointer.report
        return None if report is None else report["phases_ms"]["committed"] / 1e3

    def committed(self) -> int | None:
        return self.checkpointer.committed

    def restore(self, step: int) -> None:
        self._open()
        found = self.checkpointer.restore(self._training.state)
        assert found == step, f"expected a checkpoint of step {step}, found {found}"

    def close(self) -> None:
        self.checkpointer.close()


class Background(Way):
    """Saves one after the other; the directory of the newest committed save stays until a newer one is committed.

    Args:
        begin: Begins a save at a place, and returns it; ``None`` if it is committed already.
    """

    def __init__(
        self, place: Path, training: Training, interval: int, begin: Callable[[Path], sf.Pending | None]
    ) -> None:
        self._place, self._training, self._interval, self._begin = place, training, interval, begin
        self._running: tuple[int, sf.Pending] | None = None
        self._committed: int | None = None
        self._lag_s: float | None = None

    def stepped(self, step: int) -> None:
        if step % self._interval == 0:
            self.end()
            clear(self._place, self._committed)
            began = time.perf_counter()
            pending = self._begin(self._place / f"step-{step:08}")
            if pending is None:
                self._committed, self._lag_s = step, time.perf_counter() - began
            else:
                self._running = (step, pending)

    def end(self) -> float | None:
        if self._running is not None:
            (self._committed, pending), self._running = self._running, None
            pending.committed()
            self._lag_s = pending.report["phases_ms"]["committed"] / 1e3
        return self._lag_s

    def committed(self) -> int | None:
        if self._running is not None and self._running[1].done():
            self.end()
        return self._committed

    def restore(self, step: int) -> None:
        self._committed = step
        sf.load(self._place / f"step-{step:08}", self._training.state)

    def close(self) -> None:
        self.end()


def synchronous(place: Path, training: Training, interval: int) -> Way:
    def begin(to: Path) -> None:
        sf.save(to, training.state)

    return Background(place, training, interval, begin)


def copied(place: Path, training: Training, interval: int) -> Way:
    """The call returns when all is copied; it is written while the training goes on."""

    def begin(to: Path) -> sf.Pending:
        pending = sf.save_async(to, training.state)
        pending.staged()
        return pending

    return Background(place, training, interval, begin)


class Cloned(Background):
    """Clones the state on the device, and saves the clone while the training goes on."""

    def __init__(self, place: Path, training: Training, interval: int) -> None:
        super().__init__(place, training, interval, self._clone)

    def _clone(self, to: Path) -> sf.Pending:
        return sf.save_async(to, {"state": {name: one.clone() for name, one in self._named().items()}})

    def _named(self) -> dict[str, torch.Tensor]:
        return {str(number): tensor for number, tensor in enumerate(self._training.tensors())}

    def restore(self, step: int) -> None:
        self._committed = step
        sf.load(self._place / f"step-{step:08}", {"state": self._named()})


class Dcp(Way):
    """DCP asynchronous, with its pinned stager."""

    def __init__(self, place: Path, training: Training, interval: int) -> None:
        self._place, self._training, self._interval = place, training, interval
        self._system = DcpAsync(process=False)
        self._running: int | None = None
        self._is_begun = False
        self._committed: int | None = None

    def stepped(self, step: int) -> None:
        if step % self._interval == 0:
            self.end()
            clear(self._place, self._committed)
            to = self._place / f"step-{step:08}"
            self._system.begin(to, self._training.model, self._training.optimizer, {})
            self._running, self._is_begun = step, True

    def before_step(self) -> None:
        if self._is_begun:
            self._system.before_step()
            self._is_begun = False

    def end(self) -> float | None:
        self._system.finish()
        self._committed, self._running = self._running or self._committed, None
        return None  # it does not tell when it ended

    def committed(self) -> int | None:
        if self._running is not None and self._system.is_done():
            self.end()
        return self._committed

    def restore(self, step: int) -> None:
        from torch.distributed.checkpoint import load
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = self._training.model, self._training.optimizer
        weights, moments = get_state_dict(model, optimizer)
        load({"model": weights, "optimizer": moments}, checkpoint_id=self._place / f"step-{step:08}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        self._system, self._committed = DcpAsync(process=False), step

    def close(self) -> None:
        self.end()
        self._system.close()


def clear(place: Path, kept: int | None) -> None:
    """Deletes all checkpoints but that of step ``kept``."""
    for path in place.glob("step-*"):
        if kept is None or path.name != f"step-{kept:08}":
            shutil.rmtree(path)


Make = Callable[[Path, int], Way]
"""Makes a way that saves at a place, every so many steps."""


def ways(args: argparse.Namespace, training: Training) -> dict[str, Make]:
    def ours(over: int) -> Make:
        return lambda place, interval: Ours(place, training, interval, over)

    def rival(make: Callable[[Path, Training, int], Way]) -> Make:
        return lambda place, interval: make(place, training, interval)

    found: dict[str, Make] = {QUIET: lambda place, interval: Way(), LAZY: ours(1)}
    found |= {f"over {k} steps": ours(k) for k in args.over}
    found |= {f"over {k} steps, waited": ours(k) for k in args.over}
    found |= {"synchronous": rival(synchronous), "copied in the call": rival(copied)}
    found |= {"cloned on the device": rival(Cloned), "DCP async, pinned": rival(Dcp)}
    wanted = (QUIET, *args.ways)
    return {name: make for name, make in found.items() if not args.ways or name.startswith(wanted)}


class Trained(Training):
    """A training in which ways to save take turns."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__(args, device, seed=1)
        self.way: Way = Way()
        self.optimizer.register_step_pre_hook(lambda *_: self.way.before_step())
        self._drop = self.optimizer.zero_grad
        self.optimizer.zero_grad = lambda: self._drop(set_to_none=self.drops_gradients)  # type: ignore[method-assign]
        self.drops_gradients = True

    def use(self, name: str, way: Way) -> None:
        """Trains with ``way`` from now on."""
        self.way, self.drops_gradients = way, not name.endswith("waited")

    def run(self, first: int, steps: int) -> float:
        """Seconds of so many steps."""
        synchronize(self.device)
        began = time.perf_counter()
        for step in range(first, first + steps):
            self.step()
            self.way.stepped(step)
        synchronize(self.device)
        return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def memory_rate(device: torch.device) -> float:
    """Bytes per second that the device reads and writes in a large copy within its memory."""
    if device.type != "cuda":
        return float("nan")
    one = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    other = torch.empty_like(one)
    return max(2 * one.nbytes / seconds(lambda: other.copy_(one)) for _ in range(5))


def take_turns(args: argparse.Namespace, training: Trained, place: Path, interval: int) -> dict[str, Turns]:
    """What each way took, in rounds in which all take turns."""
    made = {name: make(place / name, interval) for name, make in ways(args, training).items()}
    saves = max(1, args.turn // interval)
    steps = saves * interval
    turns = {name: Turns(saves) for name in made}
    try:
        for round_ in range(args.rounds + 2):  # the first two are rehearsals and what is made once
            for name, way in made.items():
                training.use(name, way)
                # A save is made in the middle of each interval.
                first = 1 + round_ * steps + interval // 2
                if round_ == 0:
                    training.run(1, interval // 2)
                    way.end()
                before = time.process_time()
                took = training.run(first, steps)
                lag = way.end()
                clear(place / name, None)  # so that the disk holds the saves of one way at most
                if round_ >= 2:
                    turns[name].seconds.append(took)
                    turns[name].processor_s.append(time.process_time() - before)
                    turns[name].lags_s += [] if lag is None else [lag]
        for name, way in made.items():
            if isinstance(way, Ours):
                turns[name].ahead = way.checkpointer.capture.figures()
                print(f"  {name}: {way.checkpointer.capture}")
    finally:
        training.way = Way()
        for way in made.values():
            way.close()
    return turns


def with_crashes(
    args: argparse.Namespace, training: Trained, place: Path, turns: dict[str, Turns], step_s: float
) -> dict[str, Crashed]:
    """Trains with a crash every so many seconds, each way at the interval that is best for what its saves cost.

    A crash is not a killed process: saves under way end outside of the measured time and count as lost, then the newest
    one that was committed before the crash is loaded, and the training goes on from there.
    """
    found = {}
    for name, make in ways(args, training).items():
        if name == QUIET:
            continue
        cost_s = statistics.median(stalls(turns[name], turns[QUIET], step_s)) * step_s
        lag_s = statistics.median(turns[name].lags_s or [0.0])
        crashed = found[name] = Crashed(best_steps(step_s, cost_s, lag_s, args.crash_every))
        to, step, last = place / f"{name} with crashes", 0, None
        way = make(to, crashed.interval)
        for _ in range(args.crashes):
            training.use(name, way)
            began = time.perf_counter()
            while time.perf_counter() - began < args.crash_every:
                step += 1
                training.step()
                way.stepped(step)
            synchronize(training.device)
            crashed.seconds += time.perf_counter() - began
            last = way.committed() or last
            training.way = Way()
            way.close()
            clear(to, last)
            crashed.lost += step - (last or 0)
            step = last or 0
            if last is None:
                way = make(to, crashed.interval)
                continue
            began = time.perf_counter()
            way.restore(last)
            synchronize(training.device)
            crashed.restore_s.append(time.perf_counter() - began)
            crashed.seconds += crashed.restore_s[-1]
        way.close()
        shutil.rmtree(to, ignore_errors=True)
        crashed.remained = step
    return found


def measure(args: argparse.Namespace, device: torch.device, place: Path, batch: int) -> list[dict[str, object]]:
    args.batch = batch
    training = Trained(args, device)
    for _ in range(3):
        training.step()
    state_bytes = sum(tensor.nbytes for tensor in training.tensors())
    gradient_bytes = sum(parameter.nbytes for parameter in training.model.parameters())
    bus = copy_ceilings(device)[0] if device.type == "cuda" else float("nan")
    found: list[dict[str, object]] = []
    for interval in args.intervals:
        print(f"\nbatch {batch}, a save every {interval} steps")
        turns = take_turns(args, training, place, interval)
        step_s = statistics.median(turns[QUIET].seconds) / (turns[QUIET].saves * interval)
        machine = Machine(state_bytes, gradient_bytes, step_s, bus, memory_rate(device))
        size = f"x = {machine.x:.2f}, r = {machine.r:.3f}, {state_bytes / 1e9:.2f} GB"
        print(f"a step takes {step_s * 1e3:.1f} ms, {size}\n")
        print(text_of(COLUMNS, {name: row(name, turns, machine) for name in turns}))
        entry: dict[str, object] = {"batch": batch, "interval": interval, "machine": dataclasses.asdict(machine)}
        entry["turns"] = {name: dataclasses.asdict(one) for name, one in turns.items()}
        if args.crash_every:
            crashed = with_crashes(args, training, place, turns, step_s)
            print(f"\na crash every {args.crash_every:g} s\n")
            print(text_of(CRASHED_COLUMNS, {name: crashed_row(one, step_s) for name, one in crashed.items()}))
            entry["crashed"] = {name: dataclasses.asdict(one) for name, one in crashed.items()}
        found.append(entry)
        shutil.rmtree(place)
        place.mkdir()
    return found


def integers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batches", type=integers, default="1,2,4,8,16", help="batch sizes, which set a step's length")
    parser.add_argument("--over", type=integers, default="2,3,4,6", help="steps over which saves are captured")
    parser.add_argument("--intervals", type=integers, default="50", help="steps from one save to the next")
    parser.add_argument("--turn", type=int, default=50, help="steps of a turn, if its interval is not longer")
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=[], help="names begin so; by semicolons")
    parser.add_argument("--crash-every", type=float, default=0, help="seconds from one crash to the next; 0 for none")
    parser.add_argument("--crashes", type=int, default=3, help="of each way")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", help="cpu tries the program, and gives no figures")
    parser.add_argument("--where", type=Path, default=Path("bench-out"), help="a directory on the disk to be measured")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device(args.device)
    place: Path = args.where / "shardfast-multistep"
    place.mkdir(parents=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = []
    try:
        for batch in args.batches:
            found += measure(args, device, place, batch)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        shutil.rmtree(place)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
