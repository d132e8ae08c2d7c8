"""A real collector of OpenTelemetry's that gets the traces of a training: whole ones, and whatever becomes of it."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import shardfast as sf
import torch
from ports import free_ports

COLLECTOR = Path(__file__).parents[2] / "target" / "receivers" / "collector"

CONFIGURATION = """
receivers: {{otlp: {{protocols: {{http: {{endpoint: "127.0.0.1:{port}"}}}}}}}}
exporters: {{file: {{path: {out}/told.json, flush_interval: 100ms}}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    traces: {{receivers: [otlp], exporters: [file]}}
    metrics: {{receivers: [otlp], exporters: [file]}}
"""

# A disk of 64 KiB, which nothing else sees.
SMALL = (
    *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=64k tmpfs "$0" && exec "$@"',
)


def until(holds, seconds=90):
    """What `holds` returns as soon as that is true of something."""
    over = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < over, "it never came"
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def collecting(place, port, is_small=False):
    """A collector that writes into the new directory `place`; its process, and the file of what it logs."""
    place.mkdir()
    (out := place / "out").mkdir()
    (place / "config.yml").write_text(CONFIGURATION.format(port=port, out=out))
    command = [COLLECTOR, "--config", f"file:{place}/config.yml"]
    log = place / "log"
    with log.open("w") as printed:
        process = subprocess.Popen([*SMALL, out, *command] if is_small else command, stdout=printed, stderr=printed)
    try:
        until(lambda: "Everything is ready" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield process, log
    finally:
        process.kill()
        process.wait()


def told(place):
    """The names of the spans of each trace, by the name of its root."""
    roots, names = {}, {}
    file = place / "out" / "told.json"
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # it is being written
            for resource in json.loads(line).get("resourceSpans", ()):
                for span in resource["scopeSpans"][0]["spans"]:
                    names.setdefault(span["traceId"], set()).add(span["name"])
                    if not span.get("parentSpanId"):
                        roots[span["traceId"]] = span["name"]
    return {root: names[trace] for trace, root in roots.items()}


def whole(place):
    """The steps whose save is told by both ranks, each with its phases."""
    return {
        int(root.split()[1])
        for root, names in told(place).items()
        if names >= {root, f"{root} rank 0", f"{root} rank 1", "plan", "copy", "write", "commit", "storage write"}
    }


def trains(rank, world, run, port, enough):
    """Saves again and again until there is a file `enough`. Returns the number of saves, and the slowest one's time."""
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{port}"
    os.environ["OTEL_METRIC_EXPORT_INTERVAL"] = "500"
    torch.manual_seed(7)
    model, step, slowest = torch.nn.Linear(500, 400), 0, 0.0
    while True:
        step += 1
        began = time.monotonic()
        sf.save(f"{run}/step-{step:08}", {"model": model})
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.1)
        ends = torch.tensor(int(Path(enough).exists()))
        torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MIN)
        if ends:
            return step, slowest


def test_a_collector_gets_whole_traces_and_holds_nothing_up(ranks, tmp_path):
    run, port, enough, ended = tmp_path / "run", free_ports(1), tmp_path / "enough", []
    training = threading.Thread(target=lambda: ended.extend(ranks(2, 300)(trains, str(run), port, str(enough))))

    def newest():
        return max((int(commit.parent.name[5:]) for commit in run.glob("step-*/COMMIT")), default=0)

    def goes_on(saves=10):
        before = newest()
        until(lambda: newest() >= before + saves)

    try:
        with collecting(tmp_path / "first", port) as (collector, _):
            training.start()
            until(lambda: len(whole(tmp_path / "first")) >= 5)
            collector.send_signal(signal.SIGSTOP)
            goes_on()
            collector.send_signal(signal.SIGCONT)
            collector.kill()
            goes_on()
        with collecting(tmp_path / "small", port, is_small=True) as (_, log):
            until(lambda: "no space left on device" in log.read_text())
            goes_on()
        with collecting(tmp_path / "last", port):
            # Behind those that waited to be sent before.
            first = newest() + 20
            until(lambda: newest() >= first + 10)
            enough.touch()
            training.join()
            assert len(ended) == 2, "the training ended with an error"
            (steps, slowest), (others, _) = ended
            expected = set(range(first, steps + 1))
            until(lambda: whole(tmp_path / "last") >= expected, 30)
            assert steps == others and slowest < 5, slowest
    finally:
        enough.touch()
        if training.ident is not None:
            training.join()


def test_each_save_is_one_trace(ranks, tmp_path):
    port, enough = free_ports(1), tmp_path / "enough"
    enough.touch()
    with collecting(tmp_path / "first", port):
        ranks(2)(trains, str(tmp_path / "run"), port, str(enough))
        until(lambda: whole(tmp_path / "first") == {1}, 30)
        assert [*told(tmp_path / "first")] == ["save 1"]
