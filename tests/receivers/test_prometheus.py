"""A real Prometheus and a real Alertmanager that watch a training: rules fire, resolve, and hold nothing up."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import shardfast as sf
import torch
from ports import free_ports

ROOT = Path(__file__).parents[2]
BIN = ROOT / "target" / "receivers" / "usr" / "bin"
RULES = ROOT / "docs" / "alerts.yml"

# Alertmanager reads a file below /usr/share, where its package is not installed: it sees the unpacked one there.
SHARE = ROOT / "target" / "receivers" / "usr" / "share"
UNPACKED = (
    *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
    f'mount -t overlay overlay -o lowerdir={SHARE}:/usr/share /usr/share && exec "$0" "$@"',
)

# A directory on a disk of so many KiB, which nothing else sees.
SMALL = (
    *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
    'mkdir "$1" && mount -t tmpfs -o size="$0"k tmpfs "$1" && shift && exec "$@"',
)

CONFIGURATION = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ["127.0.0.1:{manager}"]}}]}}]}}
scrape_configs:
  - {{job_name: training, static_configs: [{{targets: [{ranks}]}}]}}
"""
MANAGER = """
route: {receiver: nobody, group_wait: 0s, group_interval: 1s}
receivers: [{name: nobody}]
"""


def asked(port, path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Content-Type": "application/json"})
    request.data = body and json.dumps(body).encode()
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def until(holds, seconds=90):
    """What `holds` returns as soon as that is true of something."""
    over = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if found := holds():
                return found
        assert time.monotonic() < over, "it never came"
        time.sleep(0.2)


@contextlib.contextmanager
def runs(log, *command):
    with log.open("w") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=printed)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()


@contextlib.contextmanager
def receivers(tmp_path, ranks_port, kib=None):
    """Both receivers; gives Prometheus's process and its port, and those of the Alertmanager.

    With ``kib`` each keeps what it knows on a disk of so many KiB.
    """

    def keeping(at):
        return () if kib is None else (*SMALL, str(kib), str(at))

    port, manager, rules = free_ports(1), free_ports(1), tmp_path / "alerts.yml"
    # The rules as they are shipped, for a job whose minutes are seconds.
    rules.write_text(RULES.read_text().replace("[15m]", "[15s]").replace("offset 15m", "offset 15s"))
    targets = ", ".join(f'"127.0.0.1:{ranks_port + rank}"' for rank in range(2))
    (tmp_path / "prometheus.yml").write_text(CONFIGURATION.format(rules=rules, manager=manager, ranks=targets))
    (tmp_path / "manager.yml").write_text(MANAGER)
    with (
        runs(
            tmp_path / "manager.log",
            *keeping(tmp_path / "manager"),
            *UNPACKED,
            str(BIN / "prometheus-alertmanager"),
            f"--config.file={tmp_path}/manager.yml",
            f"--storage.path={tmp_path}/manager",
            f"--web.listen-address=127.0.0.1:{manager}",
            "--cluster.listen-address=",
        ) as alertmanager,
        runs(
            tmp_path / "prometheus.log",
            *keeping(tmp_path / "prometheus"),
            str(BIN / "prometheus"),
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/prometheus",
            f"--web.listen-address=127.0.0.1:{port}",
        ) as prometheus,
    ):
        yield prometheus, port, alertmanager, manager


def trains(rank, world, run, port, enough, again):
    """Saves again and again until there is a file `enough`; the third save fails, and one more once there is a file
    `again`. Returns the number of saves."""
    os.environ["SHARDFAST_METRICS"] = f"127.0.0.1:{port}"
    torch.manual_seed(7)
    model, step, fails = torch.nn.Linear(500, 400), 0, {3}
    while True:
        step += 1
        if step in fails:
            with pytest.raises(sf.Conflict):
                sf.save(f"{run}/step-00000001", {"model": model})
        sf.save(f"{run}/step-{step:08}", {"model": model})
        time.sleep(0.05)
        seen = torch.tensor([int(Path(path).exists()) for path in (enough, again)])
        torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MIN)
        if seen[0]:
            return step
        if seen[1] and len(fails) == 1:
            fails.add(step + 1)


def test_rules_fire_and_resolve_and_hold_nothing_up(ranks, tmp_path):
    ranks_port, enough, again, steps = free_ports(2), tmp_path / "enough", tmp_path / "again", []
    training = threading.Thread(
        target=lambda: steps.extend(
            ranks(2, deadline_s=300)(trains, str(tmp_path / "run"), ranks_port, str(enough), str(again))
        )
    )
    with receivers(tmp_path, ranks_port) as (prometheus, port, alertmanager, manager):
        training.start()
        try:

            def alerts(state):
                found = asked(port, "/api/v1/alerts")["data"]["alerts"]
                return {one["labels"]["rank"] for one in found if one["state"] == state}

            until(lambda: alerts("firing") == {"0", "1"})
            until(lambda: len(asked(manager, "/api/v2/alerts?active=true")) == 2)
            until(lambda: not alerts("firing"))  # the failure is older than the rule looks back
            until(lambda: not asked(manager, "/api/v2/alerts?active=true"))
            # Receivers that are stopped in the middle of what they read: the training goes on.
            for process in (alertmanager, prometheus):
                process.send_signal(signal.SIGSTOP)
                before = len(list((tmp_path / "run").glob("step-*/COMMIT")))
                until(lambda before=before: len(list((tmp_path / "run").glob("step-*/COMMIT"))) > before + 5)
            prometheus.send_signal(signal.SIGCONT)
            alertmanager.send_signal(signal.SIGCONT)
            # They hear of a failure that comes now.
            again.touch()
            until(lambda: alerts("firing") == {"0", "1"})
            until(lambda: len(asked(manager, "/api/v2/alerts?active=true")) == 2)
        finally:
            enough.touch()
            training.join()
    assert len(set(steps)) == 1 and steps[0] > 5, steps


def test_receivers_whose_disks_are_full_hold_nothing_up(ranks, tmp_path):
    """Neither does an Alertmanager that cannot write down what it knows when it ends."""
    ranks_port, enough, steps = free_ports(2), tmp_path / "enough", []
    again = tmp_path / "never"
    training = threading.Thread(
        target=lambda: steps.extend(
            ranks(2, deadline_s=300)(trains, str(tmp_path / "run"), ranks_port, str(enough), str(again))
        )
    )

    def saves():
        return len(list((tmp_path / "run").glob("step-*/COMMIT")))

    full = "no space left on device"
    with receivers(tmp_path, ranks_port, kib=64) as (_, _, alertmanager, manager):
        training.start()
        try:
            until(lambda: full in (tmp_path / "prometheus.log").read_text())
            before = saves()
            until(lambda: saves() > before + 5)
            # It knows a silence, which it cannot write down.
            matcher = {"name": "rank", "value": "none", "isRegex": False}
            times = {"startsAt": "2026-01-01T00:00:00Z", "endsAt": "2100-01-01T00:00:00Z"}
            asked(manager, "/api/v2/silences", {"matchers": [matcher], "createdBy": "a", "comment": "b", **times})
            with contextlib.suppress(OSError), open(f"/proc/{alertmanager.pid}/root{tmp_path}/manager/rest", "wb") as f:
                f.write(bytes(1 << 20))
        finally:
            enough.touch()
            training.join()
    assert full in (tmp_path / "manager.log").read_text()
    assert len(set(steps)) == 1 and steps[0] > 5, steps


def test_the_rules_are_well_formed():
    checked = subprocess.run([BIN / "promtool", "check", "rules", RULES], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_rule_fires_for_its_fault_alone(tmp_path):
    text = (Path(__file__).parent / "alerts_test.yml").read_text().replace("RULES", str(RULES))
    (tmp_path / "tests.yml").write_text(text)
    tested = subprocess.run([BIN / "promtool", "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr
