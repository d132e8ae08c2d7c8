"""What it costs to tell what saves and loads do: a job with all sinks beside the same job without any, in turns.

With sinks each rank serves ``/metrics``, which a scraper reads once a second, sends traces and metrics to a collector,
and appends its events to a file. Each turn is a job of its own, since the environment is read when it begins. What an
event, a digest and a report cost is measured by `bench/scale`, on one core.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shardfast as sf
import torch
from figures import Figures, median, ratio, spread, summary, table
from ranks import ROOT, Settings, drop_page_cache, of_all, remove, run, settle, timed, turned
from states import bytes_of, counted, expect_equal, sharded, zero

OFF, ON = "without", "with all sinks"
SAVES, CALLS, WARM_UPS = 2, 60, 3
KIB = 1 << 10
PARTS = {
    "durable save": "s",
    "cold load": "s",
    "processor time": "s",
    "call": "ms",
    "step at once": "ms",
}
"""What is measured, each with its unit."""


def measure(settings: Settings) -> Figures:
    found: dict[str, dict[str, list[float]]] = {mode: {part: [] for part in PARTS} for mode in (OFF, ON)}
    for number in range(settings.warm_ups + settings.rounds):
        for mode in turned([OFF, ON], number):
            with _sinks(settings) if mode == ON else contextlib.nullcontext({}) as environment:
                of_job = run(_worker, settings, environment=environment)
            if number >= settings.warm_ups:
                for part, value in of_job.items():
                    found[mode][part].append(value)
    rows = []
    ratios = {part: ratio(found[OFF][part], found[ON][part]) for part in PARTS}
    for part, unit in PARTS.items():
        off, on = median(found[OFF][part]), median(found[ON][part])
        rows.append([part, f"{off:.3f} {unit}", f"{on:.3f} {unit}", median(ratios[part]), spread(ratios[part], 3)])
    size = settings.total_bytes / 1e9
    title = f"a job of {settings.processes} processes and {size:.1f} GB, {settings.rounds} rounds"
    table(title, ("", OFF, ON, "rate of without", "(min .. max)"), rows)
    return {
        "found": {mode: {part: summary(values) for part, values in of.items()} for mode, of in found.items()},
        "ratios": {part: summary(values) for part, values in ratios.items()},
        "scale": _scale(settings),
    }


def _scale(settings: Settings) -> list[tuple[str, float | None, float]]:
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "scale.json"
        command = ["cargo", "run", "--quiet", "--release", "--locked", "--package", "shardfast-scale", "--"]
        quick = ["--quick"] if settings.quick else []
        subprocess.run([*command, *quick, "--telemetry", "--json", str(results)], cwd=ROOT, check=True)
        figures: list[tuple[str, float | None, float]] = json.loads(results.read_text())
        return figures


def _worker(settings: Settings) -> dict[str, float]:
    """One job: the median of each part in it."""
    state, other = sharded(settings.total_bytes, seed=1), sharded(settings.total_bytes, seed=1000)
    assert bytes_of(state) > 0
    run_at, costs, loads = settings.where / "telemetry", [], []
    for step in range(1, 1 + WARM_UPS // 3 + SAVES):
        place = run_at / f"step-{step:08}"
        settle(settings)
        costs.append(timed(lambda place=place: sf.save(place, state)))
        zero(other)
        drop_page_cache(place)
        loads.append(timed(lambda place=place: sf.load(place, other)))
        expect_equal(other, state, "shardfast")
        remove(place)
    calls, waits = _calls(run_at)
    remove(run_at)
    return {
        "durable save": median([cost.seconds for cost in costs[1:]]),
        "cold load": median([cost.seconds for cost in loads[1:]]),
        "processor time": median([cost.cpu_s for cost in costs[1:]]),
        "call": calls,
        "step at once": waits,
    }


def _calls(run_at: Path) -> tuple[float, float]:
    """Medians of the call of an asynchronous save, and of the step that follows at once, of all ranks."""
    module, optimizer = counted(1000, 4 * KIB)
    took: list[float] = []
    waited: list[float] = []
    for step in range(CALLS + WARM_UPS):
        torch.distributed.barrier()
        began = time.perf_counter()
        pending = sf.save_async(run_at / f"step-{1000 + step:08}", {"model": module, "optimizer": optimizer})
        returned = time.perf_counter()
        optimizer.step()
        if step >= WARM_UPS:
            took.append(1e3 * (returned - began))
            waited.append(1e3 * (time.perf_counter() - returned))
        pending.committed()
    return (
        median([ms for rank in of_all(took) for ms in rank]),
        median([ms for rank in of_all(waited) for ms in rank]),
    )


@contextlib.contextmanager
def _sinks(settings: Settings) -> Iterator[dict[str, str]]:
    """Receivers of all that a job tells; gives the environment in which it tells them."""

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    over, server = threading.Event(), http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threads = [
        threading.Thread(target=server.serve_forever),
        threading.Thread(target=_scrapes, args=(over, [port + rank for rank in range(settings.processes)])),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for thread in threads:
            thread.start()
        try:
            yield {
                "SHARDFAST_METRICS": f"127.0.0.1:{port}",
                "SHARDFAST_EVENTS": os.path.join(folder, "events.jsonl"),
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
                "OTEL_METRIC_EXPORT_INTERVAL": "1000",
            }
        finally:
            over.set()
            server.shutdown()
            server.server_close()
            for thread in threads:
                thread.join()


def _scrapes(over: threading.Event, ports: list[int]) -> None:
    while not over.wait(1.0):
        for port in ports:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                answer.read()
