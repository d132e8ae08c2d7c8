"""The whole promise in a few minutes: train, kill in the middle of a save, resume under other layouts, compare.

1. An uninterrupted run: FSDP2 on 2 processes.
2. The same run again, killed by SIGKILL in the middle of a save; resumed from its last committed checkpoint on
   4 processes (FSDP2 × tensor parallel); then on 1 process.
3. A table and a picture of both loss curves, and what ``shardfast ls``, ``inspect`` and ``verify`` say.

``make demo`` runs it. Everything that it makes is in ``demo-out``; with ``make demo STORE=s3://bucket/prefix`` the
checkpoints are there. The README's picture, ``docs/demo.svg``, is a copy of ``demo-out/loss.svg``.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHARDFAST = Path(sys.executable).parent / "shardfast"

ABORT = "terminate called without an active exception"
"""What a process says that PyTorch 2.15 aborts when it ends, behind all that it does: about one in twenty jobs with
DTensors has such a process, with or without Shardfast."""


@dataclass(frozen=True)
class Layout:
    name: str
    processes: int
    tensor_parallel: int = 1


FSDP = Layout("2 processes, FSDP2", 2)
FSDP_TP = Layout("4 processes, FSDP2 x TP", 4, tensor_parallel=2)
SINGLE = Layout("1 process", 1)


class Job:
    """``examples/train.py`` under ``torchrun``, read line by line."""

    def __init__(self, layout: Layout, run: str, log: Path, steps: int, every: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={layout.processes}"]
        torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}"]
        train = [str(HERE / "train.py"), run, f"--steps={steps}", f"--every={every}"]
        train += [f"--tp={layout.tensor_parallel}"]
        threads = str(max(1, (os.cpu_count() or 1) // layout.processes))
        environment = dict(os.environ, OMP_NUM_THREADS=threads, PYTHONUNBUFFERED="1")
        self.log = log
        self.pids: list[int] = []
        self.ended: set[int] = set()
        with self.log.open("a") as log:
            self.begin = log.tell()
            self.torchrun = subprocess.Popen(
                torchrun + train, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def records(self) -> Iterator[dict[str, Any]]:
        assert self.torchrun.stdout is not None
        for line in self.torchrun.stdout:
            if not line.startswith("{"):
                continue
            record = json.loads(line)
            if "ended" in record:
                self.ended.add(record["ended"])
                continue
            if "pid" in record:
                self.pids.append(record["pid"])
            yield record

    def finish(self) -> None:
        if self.torchrun.wait() != 0 and not self.is_aborted_at_the_end():
            raise SystemExit(
                f"training ended with exit code {self.torchrun.returncode}:\n{self.log.read_text()[-4000:]}"
            )

    def is_aborted_at_the_end(self) -> bool:
        """Whether all that went wrong is PyTorch's :data:`ABORT`; torchrun then ends the other processes."""
        with self.log.open() as log:
            log.seek(self.begin)
            said = log.read()
        codes = {int(pid): code for code, pid in re.findall(r"exitcode *: (-?\d+) \(pid: (\d+)\)", said)}
        aborted = {pid for pid, code in codes.items() if code == str(-signal.SIGABRT)}
        terminated = {pid for pid, code in codes.items() if code == str(-signal.SIGTERM)}
        return ABORT in said and bool(aborted) and aborted <= self.ended and codes.keys() == aborted | terminated

    def kill(self) -> None:
        """SIGKILL to the training processes; torchrun then ends by itself."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.torchrun.wait()


def show(record: dict[str, Any], steps: int) -> None:
    filled = int(30 * record["step"] / steps)
    bar = "#" * filled + "." * (30 - filled)
    saved = f"   save: call took {record['save_ms']:.0f} ms" if record["saving"] else ""
    print(f"   [{bar}] step {record['step']:>3}/{steps}   loss {record['loss']:.4f}{saved}", flush=True)


def train(layout: Layout, run: str, log: Path, steps: int, every: int, total: int) -> dict[int, float]:
    """Trains up to ``steps`` and returns the loss of each step that this job trained."""
    job, losses = Job(layout, run, log, steps, every), {}
    for record in job.records():
        if "loss" in record:
            losses[record["step"]] = record["loss"]
            show(record, total)
        elif record["rank"] == 0:
            print(
                f"   {layout.name}: {record['parameters'] / 1e6:.1f} M parameters, from step {record['start']}",
                flush=True,
            )
    job.finish()
    return losses


def train_until_killed(layout: Layout, run: str, log: Path, kill_at: int, steps: int, every: int) -> dict[int, float]:
    """Trains until a save of step ``kill_at`` or later has begun to write and is not committed; kills it there."""
    job, losses = Job(layout, run, log, steps, every), {}
    for record in job.records():
        if "loss" not in record:
            continue
        losses[record["step"]] = record["loss"]
        show(record, steps)
        if record["step"] < kill_at or not record["saving"]:
            continue
        if "://" in run:
            # An upload is invisible until it is complete; a save of this size takes longer than this.
            time.sleep(0.02)
            job.kill()
            if record["step"] in committed(run):
                raise SystemExit(f"the save of step {record['step']} was committed before it could be killed")
            print(f"   killed (SIGKILL) in the middle of the save of step {record['step']}: no COMMIT", flush=True)
            return losses
        checkpoint = Path(run) / f"step-{record['step']:08}"
        while job.torchrun.poll() is None and not (checkpoint / "COMMIT").exists():
            if any(checkpoint.glob("*/*.safetensors")):
                job.kill()
                break
            time.sleep(0.0005)
        if job.torchrun.poll() is not None and not (checkpoint / "COMMIT").exists():
            written = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
            print(
                f"   killed (SIGKILL) in the middle of the save of step {record['step']}: {written / 1e6:.0f} MB",
                end=" ",
            )
            print("of it are there, no COMMIT", flush=True)
            return losses
    raise SystemExit(f"the job ended before it could be killed in a save:\n{job.log.read_text()[-4000:]}")


def below(store: str, name: str) -> str:
    """The place of ``name`` below a path or a URL, before the URL's options."""
    place, mark, options = store.partition("?") if "://" in store else (store, "", "")
    return f"{place.rstrip('/')}/{name}{mark}{options}"


def committed(run: str) -> set[int]:
    listed = subprocess.run([SHARDFAST, "ls", "--json", run], check=True, stdout=subprocess.PIPE).stdout
    return {line["step"] for line in json.loads(listed)["checkpoints"] if line["status"] == "committed"}


WIDTH, HEIGHT = 760, 320  # of the picture, in pixels
LEFT, RIGHT, TOP, BOTTOM = 44, 744, 58, 280  # of the curves in it

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f } .curve { fill: none; stroke-width: 2 }
.c0 { stroke: #c4cad1 } .c1 { stroke: #0969da } .c2 { stroke: #bc4c00 } .c3 { stroke: #1a7f37 }
.c0.curve { stroke-width: 10 } .c1.curve { stroke-width: 5 }
.axis { stroke: #8c959f } .t1 { fill: #0969da } .t2 { fill: #bc4c00 } .t3 { fill: #1a7f37 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .c0 { stroke: #4b535d } .c1 { stroke: #58a6ff } .c2 { stroke: #f0883e } .c3 { stroke: #3fb950 }
.t1 { fill: #58a6ff } .t2 { fill: #f0883e } .t3 { fill: #3fb950 } }
"""


def picture(path: Path, reference: dict[int, float], phases: list[tuple[str, dict[int, float]]], worst: float) -> None:
    """Draws the losses of both runs as an SVG: the uninterrupted one wide, each job of the other one over it."""
    top, bottom = math.ceil(max(reference.values())), math.floor(min(reference.values()))

    def at(step: int, loss: float) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * step / max(reference)
        return round(x, 1), round(BOTTOM - (BOTTOM - TOP) * (loss - bottom) / (top - bottom), 1)

    def text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
        return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{html.escape(said)}</text>'

    title = "Loss by step: killed in the middle of a save, resumed under two other layouts"
    trained = "; ".join(f"{name}, steps {min(losses)} to {max(losses)}" for name, losses in phases)
    told = f"The killed and resumed run ({trained}) lies on the uninterrupted one ({FSDP.name})"
    band = f"gray band: the uninterrupted run, {FSDP.name}; largest difference of the losses: {worst:.1e}"
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t d">',
        f'<title id="t">{title}</title>',
        f'<desc id="d">{html.escape(told)}: the largest difference of the losses is {worst:.1e}.</desc>',
        f"<style>{STYLE}</style>",
        f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>',
    ]
    drawn += [text(LEFT - 8, at(0, loss)[1] + 4, str(loss), anchor="end") for loss in range(bottom, top + 1)]
    drawn += [
        text(at(step, bottom)[0], BOTTOM + 18, str(step), anchor="middle") for step in range(0, max(reference), 5)
    ]
    drawn += [text(RIGHT, BOTTOM + 18, f"step {max(reference)}", anchor="end"), text(8, TOP - 14, "loss")]
    drawn.append(text(LEFT + 8, HEIGHT - 6, band))
    for number, losses in enumerate([reference, *(losses for _, losses in phases)]):
        points = " ".join("{},{}".format(*at(step, loss)) for step, loss in losses.items())
        drawn.append(f'<polyline class="curve c{number}" points="{points}"/>')
    for number, (name, losses) in enumerate(phases, 1):
        start, line = at(min(losses) - 1, bottom)[0], TOP - 38 + 17 * (number - 1)
        drawn.append(f'<path class="c{number}" stroke-dasharray="3 3" d="M{start} {line - 10}V{BOTTOM}"/>')
        drawn.append(text(start + 6, line, name if number == 1 else f"resumed on {name}", f"t{number}"))
    killed = phases[0][1]
    x, y = at(max(killed), killed[max(killed)])
    drawn.append(f'<path class="c1" d="M{x} {y}V{y - 70}"/>')
    drawn.append(f'<path class="c1" stroke-width="3" d="M{x - 6} {y - 6}l12 12m0 -12l-12 12"/>')
    drawn.append(text(x + 6, y - 62, f"killed in the save of step {max(killed)}", "t1"))
    path.write_text("\n".join([*drawn, "</svg>", ""]), encoding="utf-8")


def table(reference: dict[int, float], phases: list[tuple[str, dict[int, float]]], every: int) -> float:
    resumed: dict[int, tuple[str, float]] = {}
    for name, losses in phases:
        resumed |= {step: (name, loss) for step, loss in losses.items()}
    worst = max(abs(resumed[step][1] - reference[step]) for step in reference)
    print(f"\n   {'step':>4}  {'uninterrupted':>13}  {'resumed':>8}  {'difference':>10}  trained on")
    for step in sorted(reference):
        if step % every == 0:
            name, loss = resumed[step]
            print(f"   {step:>4}  {reference[step]:>13.5f}  {loss:>8.5f}  {loss - reference[step]:>+10.1e}  {name}")
    return worst


def command(*arguments: str) -> None:
    print(f"\n$ shardfast {' '.join(arguments)}", flush=True)
    subprocess.run([SHARDFAST, *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--store", default="", help="where the checkpoints go: a path or a URL; --out by default")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--every", type=int, default=5)
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    store = args.store or str(args.out)
    # A store may hold the runs of an earlier demonstration: they would go on where those ended.
    suffix = f"-{int(time.time())}" if args.store else ""
    reference_run, run = below(store, f"uninterrupted{suffix}"), below(store, f"run{suffix}")
    log = args.out / "training.log"
    third = args.steps // 3

    began = time.monotonic()
    print(f"1. Uninterrupted: {FSDP.name}", flush=True)
    reference = train(FSDP, reference_run, log, args.steps, args.every, args.steps)
    print(f"2. The same, killed in the middle of a save: {FSDP.name}", flush=True)
    killed = train_until_killed(FSDP, run, log, third, args.steps, args.every)
    print(f"3. Resumed on {FSDP_TP.name}", flush=True)
    resharded = train(FSDP_TP, run, log, 2 * third, args.every, args.steps)
    print(f"4. Resumed on {SINGLE.name}", flush=True)
    single = train(SINGLE, run, log, args.steps, args.every, args.steps)

    phases = [(FSDP.name, killed), (FSDP_TP.name, resharded), (SINGLE.name, single)]
    worst = table(reference, phases, args.every)
    picture(args.out / "loss.svg", reference, phases, worst)
    print(f"\n   largest difference between the two curves: {worst:.1e}   picture: {args.out / 'loss.svg'}", flush=True)

    command("ls", run)
    sharded = below(run, f"step-{2 * third:08}") if 2 * third in committed(run) else run
    command("inspect", sharded, "--leaf", "*blocks.0.up.*")
    command("verify", run, "--all")
    print(f"\ndone in {time.monotonic() - began:.0f} s")
    if worst > 0.05:
        raise SystemExit(f"the curves differ by {worst}: expected at most 0.05")


if __name__ == "__main__":
    main()
