"""What a save holds up the training on a device, by the number of steps over which it is captured.

One model, several batch sizes: the longer a step, the more of the copy it hides. `x` is the time of the copy in steps.
Every way to save trains in turns, an interval of steps with one save in its middle, beside the same number of steps
without one. The law is that of `crates/engine/src/ahead/choice.rs`.

    bench/gpu/run.sh --multistep                       # x from about 0.5 to 5
    PYTHONPATH=bench python bench/gpu/multistep.py --batches 1,2,4,8 --where /mnt/nvme --json figures.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import shardfast as sf
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from asynchronous import DcpAsync
from measure import Training, copy_ceilings


class Way(Protocol):
    """A way to save."""

    def stepped(self, step: int) -> None:
        """A step is over, the ``step``-th of this way; it saves in the middle of each interval."""

    def before_step(self) -> None:
        """The optimizer is about to step."""

    def close(self) -> None:
        """Ends what is under way."""


class Nothing:
    """No checkpoints."""

    def stepped(self, step: int) -> None:
        pass

    def before_step(self) -> None:
        pass

    def close(self) -> None:
        pass


class Ours(Nothing):
    """A ``Checkpointer`` whose saves are captured over so many steps."""

    def __init__(self, place: Path, training: Training, interval: int, over: int | None) -> None:
        self._training, self._shift = training, interval // 2
        self.checkpointer = sf.Checkpointer(place, every=sf.steps(interval), over=over, keep=sf.last(1))

    def stepped(self, step: int) -> None:
        self.checkpointer.step(step + self._shift, self._training.state)

    def close(self) -> None:
        self.checkpointer.close()


class InTheMiddle(Nothing):
    """Calls ``begin`` in the middle of each interval, ``wait`` before the optimizer's next step, ``end`` at last."""

    def __init__(
        self,
        interval: int,
        begin: Callable[[int], None],
        wait: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._interval, self._begin, self._wait, self._end, self._is_begun = interval, begin, wait, end, False

    def stepped(self, step: int) -> None:
        if step % self._interval == self._interval // 2:
            self._begin(step)
            self._is_begun = True

    def before_step(self) -> None:
        if self._is_begun:
            self._wait()
            self._is_begun = False

    def close(self) -> None:
        self._end()


def cloned(place: Path, training: Training, interval: int) -> Way:
    """Clones the state on the device, and saves the clone while the training goes on."""
    running: list[sf.Pending] = []

    def end() -> None:
        for pending in running:
            pending.committed()
        running.clear()

    def begin(step: int) -> None:
        end()
        shutil.rmtree(place, ignore_errors=True)
        tensors = {str(number): tensor.clone() for number, tensor in enumerate(training.tensors())}
        running.append(sf.save_async(place / f"{step}", {"state": tensors}))

    return InTheMiddle(interval, begin, end=end)


def synchronous(place: Path, training: Training, interval: int) -> Way:
    def begin(step: int) -> None:
        shutil.rmtree(place, ignore_errors=True)
        sf.save(place / f"{step}", training.state)

    return InTheMiddle(interval, begin)


def dcp(place: Path, training: Training, interval: int) -> Way:
    """DCP asynchronous, with its pinned stager."""
    system = DcpAsync(process=False)

    def begin(step: int) -> None:
        system.finish()
        shutil.rmtree(place, ignore_errors=True)
        system.begin(place / f"{step}", training.model, training.optimizer, {})

    def end() -> None:
        system.finish()
        system.close()

    return InTheMiddle(interval, begin, system.before_step, end)


def law(x: float, r: float, steps: int, *, is_waited: bool) -> float:
    """The stall in steps of a capture over so many steps."""
    if steps == 1:
        return max(0.0, x - 1)
    held = waited = 0.0
    for step in range(steps):
        gradients = r * held if step else 0.0
        waited += gradients if is_waited else 0.0
        held = min(x, held + (1.0 if is_waited else max(0.0, 1.0 - gradients)))
    return x - held + waited


class Trained(Training):
    """A training in which ways to save take turns."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__(args, device, seed=1)
        self.way: Way = Nothing()
        self.optimizer.register_step_pre_hook(lambda *_: self.way.before_step())
        self._drop = self.optimizer.zero_grad
        self.optimizer.zero_grad = lambda: self._drop(set_to_none=self.drops_gradients)  # type: ignore[method-assign]
        self.drops_gradients = True

    def run(self, way: Way, first: int, steps: int) -> float:
        """Seconds of so many steps."""
        self.way = way
        synchronize(self.device)
        began = time.perf_counter()
        for step in range(first, first + steps):
            self.step()
            way.stepped(step)
        synchronize(self.device)
        self.way = Nothing()
        return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(args: argparse.Namespace, device: torch.device, place: Path, batch: int) -> dict[str, object]:
    args.batch = batch
    training = Trained(args, device)
    for _ in range(3):
        training.step()
    state_bytes = sum(tensor.nbytes for tensor in training.tensors())
    r = sum(parameter.nbytes for parameter in training.model.parameters()) / state_bytes
    interval = args.interval
    ways: dict[str, Way] = {"no checkpoints": Nothing()}
    for name, over in (("one step (lazy)", 1), ("chosen", None), *((f"over {k} steps", k) for k in args.over)):
        ways[name] = Ours(place / name, training, interval, over)
    ways |= {f"over {k} steps, waited": Ours(place / f"waited {k}", training, interval, k) for k in args.over}
    ways["in the call"] = synchronous(place / "call", training, interval)
    ways["cloned on the device"] = cloned(place / "clone", training, interval)
    ways["DCP async, pinned"] = dcp(place / "dcp", training, interval)
    took: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for round_ in range(args.rounds + 2):  # the first two are rehearsals and what is made once
            for name, way in ways.items():
                training.drops_gradients = not name.endswith("waited")
                seconds = training.run(way, 1 + round_ * interval, interval)
                if round_ >= 2:
                    took[name].append(seconds)
        told = {name: str(way.checkpointer.capture) for name, way in ways.items() if isinstance(way, Ours)}
        figures = {name: way.checkpointer.capture.figures() for name, way in ways.items() if isinstance(way, Ours)}
    finally:
        for way in ways.values():
            way.close()
    step_s = statistics.median(took["no checkpoints"]) / interval
    rate = copy_ceilings(device)[0] if device.type == "cuda" else float("nan")
    x = state_bytes / rate / step_s
    print(f"\nbatch {batch}: a step takes {step_s * 1e3:.1f} ms, x = {x:.2f}, r = {r:.3f}, {state_bytes / 1e9:.2f} GB")
    print(f"  {'':<26} {'stall in steps':>32} {'law':>6} {'training':>9}")
    for name, times in took.items():
        stalls = [(one - quiet) / step_s for one, quiet in zip(times, took["no checkpoints"], strict=True)]
        kept = [quiet / one for one, quiet in zip(times, took["no checkpoints"], strict=True)]
        over = 1 if name.startswith("one step") else next((k for k in args.over if name.startswith(f"over {k}")), None)
        expected = f"{law(x, r, over, is_waited=name.endswith('waited')):.2f}" if over else ""
        spread = f"{statistics.median(stalls):.2f} ({min(stalls):.2f} .. {max(stalls):.2f})"
        print(f"  {name:<26} {spread:>32} {expected:>6} {statistics.median(kept):>9.3f}")
    for name, text in told.items():
        print(f"  {name}: {text}")
    return {"batch": batch, "step_s": step_s, "x": x, "r": r, "took": took, "told": told, "figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batches", default="1,2,4,8,16", help="batch sizes, which set how long a step is")
    parser.add_argument("--over", default="2,3,4,6", help="steps over which saves are captured")
    parser.add_argument("--interval", type=int, default=50, help="steps from one save to the next")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", help="cpu tries the program, and gives no figures")
    parser.add_argument("--where", type=Path, default=Path("bench-out"), help="a directory on the disk to be measured")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    args = parser.parse_args()
    args.over = [int(one) for one in args.over.split(",")]
    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device(args.device)
    place: Path = args.where / "shardfast-multistep"
    place.mkdir(parents=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = []
    try:
        for batch in args.batches.split(","):
            found.append(measure(args, device, place, int(batch)))
            shutil.rmtree(place)
            place.mkdir()
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        shutil.rmtree(place)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
