"""A real MinIO and a real Prometheus that tell their own side of saves."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import shardfast as sf
import torch
from ports import free_ports
from servers import running

BIN = Path(__file__).parents[2] / "target" / "receivers" / "usr" / "bin"
COMMAND = Path(sys.executable).with_name("shardfast")
METRICS = "/minio/v2/metrics/cluster"
BYTES = 40_000_000  # of each save
SAVES_FOR_S = 40

CONFIGURATION = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - {{job_name: minio, metrics_path: {path}, static_configs: [{{targets: ["{minio}"]}}]}}
  - {{job_name: itself, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}
"""


@pytest.fixture(scope="module")
def minio():
    with running("minio") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@contextlib.contextmanager
def prometheus(place, server):
    """Scrapes the server each second; gives the port."""
    port, target = free_ports(1), urlsplit(server.endpoint).netloc
    (place / "prometheus.yml").write_text(CONFIGURATION.format(path=METRICS, minio=target, port=port))
    options = [f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/data"]
    command = [BIN / "prometheus", *options, f"--web.listen-address=127.0.0.1:{port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def scraped(port):
    """How many samples Prometheus has of the server."""
    query = f"http://127.0.0.1:{port}/api/v1/query?query=count_over_time(up%7Bjob%3D%22minio%22%7D%5B1h%5D)"
    with contextlib.suppress(OSError), urllib.request.urlopen(query, timeout=10) as answer:
        found = json.load(answer)["data"]["result"]
        return int(found[0]["value"][1]) if found else 0
    return 0


def until(holds, seconds=60):
    over = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < over, "it never came"
        time.sleep(0.2)


def told(*arguments):
    done = subprocess.run([COMMAND, *arguments, "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def save(server, prefix, steps):
    for step in steps:
        where = server.s3(f"{prefix}/step-{step:08}")
        sf.save(where, {"model": {"w": torch.zeros(BYTES // 4) + step}})


def test_a_report_has_the_rates_of_each_save(minio, tmp_path):
    with prometheus(tmp_path, minio) as port:
        until(lambda: scraped(port) > 2)
        # MinIO counts anew each ten seconds at most: what one short save moves would be seen after its end.
        number, over = 0, time.monotonic() + SAVES_FOR_S
        with sf.Checkpointer(minio.s3("told"), every=sf.steps(1), keep=sf.last(2)) as ckpt:
            while time.monotonic() < over:
                number += 1
                ckpt.step(number, {"model": {"w": torch.zeros(BYTES // 4) + number}})
                ckpt.wait()
        scraped_then = scraped(port)
        until(lambda: scraped(port) > scraped_then + 15)
        selected = f'http://127.0.0.1:{port}/?match={{job="minio"}}'
        report = told("report", minio.s3("told"), "--storage", selected)
        page = tmp_path / "page.html"
        told("report", minio.s3("told"), "--storage", selected, "--out", str(page))
        assert "minio_s3_traffic_received_bytes" in page.read_text()
        wrong = subprocess.run(
            [COMMAND, "report", minio.s3("told"), "--storage", f"http://127.0.0.1:{port}"],
            capture_output=True,
            text=True,
        )
        assert wrong.returncode != 0 and "its jobs: itself, minio" in wrong.stderr, wrong.stderr
    received, saves = 0.0, [one for one in report["saves"] if "storage" in one]
    assert len(saves) == min(number, 50), "those that are asked for"
    for one in saves:
        rates = {rate["name"]: rate for rate in one["storage"]["rates"]}
        assert not any(name.startswith(("go_", "prometheus_")) for name in rates)
        got = rates.get("minio_s3_traffic_received_bytes")
        received += got["value"] * one["ended_ms"] / 1e3 if got else 0.0
        assert any("free" in room["name"] and room["value"] > 0 for room in one["storage"]["capacity"])
    # Between two scrapes a counter is taken to grow evenly.
    assert 0 < received < len(saves) * 1.5 * BYTES


def test_top_shows_what_grows_now(minio):
    storage, run = minio.endpoint + METRICS, minio.s3("now")
    save(minio, "now", [1])
    saving = subprocess.Popen(
        [sys.executable, "-c", SAVES, minio.endpoint, minio.bucket], env={**os.environ, **minio.environment}
    )
    try:
        shown = told("top", run, "--once", "--every", "15", "--storage", storage)["storage"]
    finally:
        saving.kill()
        saving.wait()
    rates = {rate["name"]: rate["value"] for rate in shown["rates"]}
    assert rates["minio_s3_traffic_received_bytes"] > 1e5, shown
    assert any(name.startswith("minio_s3_requests_total{api=") for name in rates), shown
    assert shown["capacity"][0]["is_bytes"]
    refused = subprocess.run([COMMAND, "report", run, "--storage", storage], capture_output=True, text=True)
    assert refused.returncode != 0 and "expected a Prometheus server" in refused.stderr, refused.stderr


SAVES = """
import itertools, sys
import shardfast as sf, torch
endpoint, bucket = sys.argv[1:]
for step in itertools.count(2):
    sf.save(f"s3://{bucket}/now/step-{step:08}?endpoint={endpoint}", {"model": {"w": torch.zeros(1_000_000) + step}})
"""
