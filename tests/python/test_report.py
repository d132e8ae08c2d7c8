"""What saves and loads did on every rank: records beside the checkpoints, the command, and the file of events."""

import contextlib
import csv
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import shardfast as sf
import torch

COMMAND = Path(sys.executable).with_name("shardfast")


def state_of(rank, rows=400):
    torch.manual_seed(rank)
    model = torch.nn.Linear(500, rows)
    return {"model": model, "extra": {"rank": sf.PerRank(rank), "step": 1}}


def reported(run, *options):
    text = subprocess.run([COMMAND, "report", run, "--json", *options], check=True, capture_output=True, text=True)
    return json.loads(text.stdout)


def trains(rank, world, run, stopped=None):
    """Saves three steps and restores; ``stopped`` is a rank that is stopped for a while in the second save."""
    torch.manual_seed(7)
    state = state_of(7)
    state["extra"]["rank"] = sf.PerRank(rank)
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
        for step in (1, 2, 3):
            if step == 2 and rank == stopped:
                stop_self_for(0.8)
            ckpt.step(step, state)
            ckpt.wait()
    with sf.Checkpointer(run) as ckpt:
        assert ckpt.restore(state) == 3
    until = time.monotonic() + 60
    while not list(Path(run, ".telemetry").glob("*-load-*.safetensors")) and time.monotonic() < until:
        time.sleep(0.01)  # it is stored by a thread that nobody waits for


def stop_self_for(seconds):
    """Stops this process for a while, as a machine that swaps or a debugger does."""
    me = os.getpid()
    child = subprocess.Popen(
        [sys.executable, "-c", f"import os,time; time.sleep({seconds}); os.kill({me}, {int(signal.SIGCONT)})"]
    )
    os.kill(me, signal.SIGSTOP)
    child.wait()


def test_every_save_and_load_of_a_run_is_reported_with_all_ranks(ranks, tmp_path):
    run = str(tmp_path / "run")
    ranks(2)(trains, run)
    report = reported(run)
    assert [(save["step"], save["outcome"], save["world"]) for save in report["saves"]] == [
        (step, "committed", 2) for step in (1, 2, 3)
    ]
    assert [(load["step"], load["outcome"]) for load in report["loads"]] == [(3, "loaded")]
    for operation in (*report["saves"], *report["loads"]):
        assert operation["not_reporting"] == []
        for phase, times in operation["phases"].items():
            assert len(times) == 2 and all(ms is not None and ms >= 0 for ms in times), phase
    assert {"plan", "copy", "write", "agree", "values", "commit"} <= set(report["saves"][0]["phases"])
    assert report["saves"][0]["files"] == len(list(Path(run, "step-00000001").rglob("*/*-*.safetensors")))
    bytes_of = sum(path.stat().st_size for path in Path(run, "step-00000001").rglob("*") if path.is_file())
    assert bytes_of <= report["saves"][0]["bytes"] < 1.1 * bytes_of  # direct I/O writes whole blocks
    wasted = [save["wasted"] for save in reported(run, "--mtbf", "1h")["saves"] if "wasted" in save]
    assert len(wasted) == 2 and all(0 < one["best_waste"] <= one["waste"] for one in wasted), wasted
    assert "\ntime lost: " in command(run, "--mtbf", "1h").stdout and "time lost" not in command(run).stdout
    assert "cannot be used with" in command(run, "--mtbf", "1h", "--csv").stderr
    text = subprocess.run([COMMAND, "report", run], check=True, capture_output=True, text=True).stdout
    assert text.startswith(f"run {run}: 3 saves, 1 load; the median save is durable after ")


def test_the_time_that_the_training_waited_is_told(tmp_path):
    module = torch.nn.Linear(4000, 4000)  # written for longer than the call takes
    optimizer = torch.optim.SGD(module.parameters())
    began = time.perf_counter()
    pending = sf.save_async(tmp_path / "run" / "step-00000001", {"model": module, "optimizer": optimizer})
    optimizer.step()
    waited_ms = 1e3 * (time.perf_counter() - began)
    pending.committed()
    sf.save(tmp_path / "run" / "step-00000002", {"model": module, "optimizer": optimizer})
    sf.load(tmp_path / "run" / "step-00000002", {"model": module, "optimizer": optimizer})
    until = time.monotonic() + 60
    while not list((tmp_path / "run" / ".telemetry").glob("*-load-*")) and time.monotonic() < until:
        time.sleep(0.01)
    report = reported(str(tmp_path / "run"))
    asynchronous, waited_for = report["saves"]
    assert 0 < asynchronous["waited_ms"] < asynchronous["stalled_ms"] <= waited_ms
    assert waited_for["waited_ms"] is None and waited_for["stalled_ms"] is None
    assert report["loads"][0]["stalled_ms"] is None


def test_a_rank_that_comes_late_is_named(ranks, tmp_path):
    run = str(tmp_path / "run")
    ranks(3)(trains, run, 1)
    verdicts = reported(run, "--step", "2")["saves"][0]["verdicts"]
    assert [(found["subject"], found["cause"]) for found in verdicts[:1]] == [("rank 1", "called_late")], verdicts
    assert 400 < verdicts[0]["lost_ms"] < 5000


def test_a_checkpoint_of_no_run_leaves_no_record(tmp_path):
    sf.save(tmp_path / "one", state_of(0))
    sf.load(tmp_path / "one", state_of(1))
    time.sleep(0.3)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    found = subprocess.run([COMMAND, "report", tmp_path], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (3, "")
    assert "expected a run" in found.stderr


def command(run, *options):
    return subprocess.run([COMMAND, "report", run, *options], capture_output=True, text=True, timeout=120)


def test_other_programs_read_traces_and_tables(ranks, tmp_path):
    run, trace = tmp_path / "run", tmp_path / "trace.json"
    ranks(2)(trains, str(run))
    report = reported(run)
    printed = command(run, "--csv")
    rows = list(csv.DictReader(printed.stdout.splitlines()))
    for operation, word in ((report["saves"][1], "save"), (report["loads"][0], "load")):
        found = [row for row in rows if (row["operation"], row["step"]) == (word, f"{operation['step']}")]
        assert len(found) == 2 * len(operation["phases"])
        for row in found:
            expected = operation["phases"][row["phase"]][int(row["rank"])]
            assert float(row["took_ms"]) == pytest.approx(expected, abs=0.002) and row["ranks"] == "2"
    assert command(run, "--trace", trace, "--step", "2").returncode == 0
    slices = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    (save,) = [save for save in report["saves"] if save["step"] == 2]
    for rank in (0, 1):
        mine = [event for event in slices if event["pid"] == rank]
        phases = {event["name"]: event["dur"] / 1e3 for event in mine if event["cat"] == "phases"}
        assert phases == pytest.approx({phase: ms[rank] for phase, ms in save["phases"].items()}, abs=0.002)
        stored = [event for event in mine if event["cat"] == "storage"]
        assert len(stored) == save["events"][rank]["count"] > 5
        assert any(event["args"].get("bytes") and event["args"]["object"] for event in stored)
    assert [command(run, *options).returncode for options in (("--trace", trace), ("--out", trace))] == [5, 5]
    for two in (("--csv", "--json"), ("--csv", "--trace", "x"), ("--json", "--trace", "x"), ("--out", "x", "--csv")):
        refused = command(run, *two)
        assert refused.returncode == 2 and "cannot be used with" in refused.stderr and not refused.stdout, two


@pytest.mark.parametrize("option", ["--trace", "--out"])
def test_a_file_that_cannot_be_written_whole_is_not_left(tmp_path, option):
    run, out = tmp_path / "run", tmp_path / "out"
    sf.save(f"{run}/step-00000001", {"x": {"w": torch.ones(10)}}, step=1)
    until = time.monotonic() + 60
    while not list(Path(run, ".telemetry").glob("*-save-*.safetensors")) and time.monotonic() < until:
        time.sleep(0.01)

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    failed = subprocess.run([COMMAND, "report", run, option, out], capture_output=True, text=True, preexec_fn=limited)
    assert failed.returncode and str(out) in failed.stderr and not out.exists(), failed.stderr
    missing = command(tmp_path / "none", option, out)
    assert missing.returncode and not out.exists(), missing.stderr
    assert command(run, option, out).returncode == 0 and out.stat().st_size > 1000


EVENTS = """
import sys, torch, shardfast as sf
with sf.Checkpointer(sys.argv[1], every=sf.steps(1)) as ckpt:
    ckpt.step(1, {"model": torch.nn.Linear(500, 400)})
"""


def events(place, path):
    environment = {**os.environ, "SHARDFAST_EVENTS": str(path)}
    subprocess.run([sys.executable, "-c", EVENTS, place], check=True, env=environment, timeout=120)
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def test_the_file_of_events_has_each_operation_and_phase(tmp_path):
    found = events(tmp_path / "run", tmp_path / "events.jsonl")
    assert {(line["operation"], line["rank"]) for line in found} == {("save", 0)}
    phases = [
        line["event"]
        for line in found
        if line["event"] in ("planned", "captured", "staged", "written", "durable", "committed")
    ]
    assert sorted(phases) == sorted(["planned", "captured", "staged", "written", "durable", "committed"])
    files = {
        path.name: path.stat().st_size
        for path in (tmp_path / "run" / "step-00000001").rglob("*/*.safetensors")
        if "-" in path.name
    }
    written = dict.fromkeys(files, 0)
    for line in found:
        if line["event"] == "write":
            kept = line["object"].split("…")[0].split("/")[-1]  # without the digits that all files share
            (name,) = [name for name in files if name.startswith(kept)]
            written[name] += line.get("bytes", 0)
    assert all(written[name] >= size > 0 for name, size in files.items()), (written, files)
    assert found[-1]["event"] == "outcome" and found[-1]["at_ms"] > 0


@pytest.mark.parametrize("place", ["/dev/full", "/nowhere/events", "."])
def test_events_that_cannot_be_written_fail_no_save(tmp_path, place):
    assert events(tmp_path / "run", Path(place)) == []
    assert (tmp_path / "run" / "step-00000001" / "COMMIT").exists()


def test_records_that_cannot_be_written_fail_no_save(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".telemetry").write_text("mine")
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
        ckpt.step(1, state_of(0))
    assert (run / ".telemetry").read_text() == "mine"
    assert sf.Checkpointer(run).restore(state_of(1)) == 1
    report = reported(run)
    assert [(save["step"], save["outcome"], save["world"]) for save in report["saves"]] == [(1, "committed", None)]


def test_a_run_of_killed_saves_is_reported(tmp_path):
    run = tmp_path / "run"
    with sf.Checkpointer(run, every=sf.steps(1)) as ckpt:
        ckpt.step(1, state_of(0))
    (run / "step-00000002" / "model").mkdir(parents=True)
    found = [(save["step"], save["outcome"]) for save in reported(run)["saves"]]
    assert found == [(1, "committed"), (2, "incomplete")]


def test_an_ending_process_leaves_the_record_of_its_last_save(tmp_path):
    code = """
import sys, torch, shardfast as sf
sf.save_async(sys.argv[1] + "/step-00000001", {"model": torch.nn.Linear(500, 400)}, step=1)
"""
    for _ in range(3):
        run = tmp_path / f"run-{time.monotonic_ns()}"
        subprocess.run([sys.executable, "-c", code, run], check=True, timeout=120)
        assert reported(run)["saves"][0]["world"] == 1


def test_threads_that_save_at_once_are_recorded_each(tmp_path):
    def saves(number):
        with contextlib.suppress(sf.Invalid), sf.Checkpointer(tmp_path / f"{number}", every=sf.steps(1)) as ckpt:
            ckpt.step(1, state_of(number))

    threads = [threading.Thread(target=saves, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        if (tmp_path / f"{number}" / "step-00000001" / "COMMIT").exists():
            assert reported(tmp_path / f"{number}")["saves"][0]["world"] == 1


FAILING = """
import json, resource, sys, torch, shardfast as sf
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.ones(1, 300)).sum().backward()
optimizer.step()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
pending = sf.save_async(sys.argv[1], {"m": model, "o": optimizer})
try:
    pending.committed()
except sf.Exhausted:
    print(json.dumps(pending.report))
"""


def test_the_report_of_a_failed_save_says_only_what_was_written(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", FAILING, tmp_path / "one"], check=True, capture_output=True, text=True, timeout=120
    )
    report = json.loads(run.stdout)
    assert (report["bytes_written"], report["files_written"]) == (0, 0)
    assert not {"written", "durable", "committed"} & set(report["phases_ms"])
    assert report["failures"]


class Endless:
    """A part of the state whose failure says more than anybody reads."""

    def state_dict(self):
        raise ValueError("<script>" + "x" * 10_000_000)

    def load_state_dict(self, state):
        pass


def test_a_failure_of_ten_megabytes_is_told_in_a_few_words(tmp_path):
    run = tmp_path / "run"
    sf.save(run / "step-00000001", state_of(1))
    with pytest.raises(ValueError, match="xxx"):
        sf.save(run / "step-00000002", {**state_of(1), "endless": Endless()})
    until = time.monotonic() + 60
    while len(list((run / ".telemetry").iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    records = sorted((run / ".telemetry").iterdir())
    assert len(records) == 2 and max(path.stat().st_size for path in records) < 16 << 10
    text = command(run, "--out", tmp_path / "page.html").stdout
    assert "ValueError: <script>x" in text and len(text) < 4000, text
    page = (tmp_path / "page.html").read_text()
    assert "\\u003cscript>x" in page and "<script>x" not in page and len(page) < 200_000


def differing(rank, world, url):
    """The report of a save that fails since replicas differ, after all of it was written."""
    pending = sf.save_async(url, {"x": {"w": torch.full((1_000_000,), float(rank))}})
    with pytest.raises(sf.Invalid, match="replicas"):
        pending.committed()
    return pending.report


def test_the_report_of_a_save_whose_replicas_differ_has_the_files_that_were_written(ranks, tmp_path):
    for report in ranks(2)(differing, str(tmp_path / "one")):
        assert "written" in report["phases_ms"] and "committed" not in report["phases_ms"]
        assert report["files_written"] == 1 and report["bytes_written"] > 1_900_000


SAVING = """
import os, sys, torch, shardfast as sf
run, first = sys.argv[1], int(sys.argv[2])
state = {f"t{i}": torch.zeros(100_000) for i in range(4)}
for step in range(first, first + 1000):
    sf.save(f"{run}/step-{step:08}", state)
    print(step, flush=True)
"""


def test_the_report_has_the_saves_of_a_job_that_is_killed_at_any_moment(tmp_path):
    run, dice, first = tmp_path / "run", random.Random(39), 1
    for _ in range(int(os.environ.get("SHARDFAST_REPORT_KILLS", "3"))):
        with subprocess.Popen(
            [sys.executable, "-c", SAVING, str(run), str(first)], stdout=subprocess.PIPE, text=True
        ) as job:
            job.stdout.readline()
            time.sleep(dice.uniform(0, 0.2))
            job.kill()
        places = {int(path.name.removeprefix("step-")): path for path in run.glob("step-*")}
        outcomes = {save["step"]: save["outcome"] for save in reported(str(run))["saves"]}
        expected = {step: "committed" if (path / "COMMIT").exists() else "incomplete" for step, path in places.items()}
        assert outcomes == expected
        first = max(places) + 1
    assert len(expected) > 3


def test_a_trainers_directory_named_by_its_step_has_records(tmp_path):
    records = tmp_path / "out" / ".telemetry"
    sf.save(tmp_path / "out" / "checkpoint-5" / "shardfast", state_of(0))  # without its step: a guess
    sf.load(tmp_path / "out" / "checkpoint-5" / "shardfast", state_of(1))
    time.sleep(0.3)
    assert not records.exists()
    sf.save(tmp_path / "out" / "checkpoint-6" / "shardfast", state_of(0), step=6)
    sf.load(tmp_path / "out" / "checkpoint-6" / "shardfast", state_of(1))
    until = time.monotonic() + 60
    while not list(records.glob("*-load-*")) and time.monotonic() < until:
        time.sleep(0.01)
    report = reported(str(tmp_path / "out"))
    assert [(save["step"], save["outcome"]) for save in report["saves"]] == [(6, "committed")]
    assert [(load["step"], load["outcome"]) for load in report["loads"]] == [(6, "loaded")]


def recorded(run):
    """Saves one step and waits for its record, which a thread stores that no call waits for."""
    sf.save(run / "step-00000001", state_of(0))
    until = time.monotonic() + 60
    while not (found := list((run / ".telemetry").glob("*-save-*.safetensors"))) and time.monotonic() < until:
        time.sleep(0.01)
    return found[0]


def test_a_step_that_the_run_does_not_have_is_refused(tmp_path):
    run = tmp_path / "run"
    for step in (1, 2):
        sf.save(run / f"step-{step:08}", state_of(0))
    found = command(run, "--step", "7")
    assert (found.returncode, found.stdout) == (3, ""), found
    assert "expected a save or a load of step 7, or its record, found 2 steps, 1 to 2" in found.stderr


def test_a_checkpoint_that_leaves_is_called_so(tmp_path):
    run = tmp_path / "run"
    recorded(run).unlink()
    (run / "step-00000001" / "COMMIT").rename(run / "step-00000001" / ".leaving")
    listed = subprocess.run([COMMAND, "ls", run], check=True, capture_output=True, text=True).stdout
    assert "leaving" in listed
    assert [save["outcome"] for save in reported(run)["saves"]] == ["leaving"]


def test_a_link_to_itself_among_the_records_is_passed_over(tmp_path):
    run = tmp_path / "run"
    records = recorded(run).parent
    for name in ("lp", "1700000000000-save-00000003.safetensors"):
        (records / name).symlink_to(name)
    report = reported(run)
    assert [save["step"] for save in report["saves"]] == [1]
    assert report["unreadable"] == [], "as one that leads nowhere"
