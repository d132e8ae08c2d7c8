"""The runner of `make test`: a step that fails is named at once, fails the run, and the others end."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from sources import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import steps
from steps import Step


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def outcomes(tmp_path) -> dict[str, str]:
    return {step["name"]: step["outcome"] for step in json.loads((tmp_path / "steps.json").read_text())["steps"]}


def test_a_step_that_fails_is_named_at_once_and_the_others_end(tmp_path, capfd):
    two = os.cpu_count() / 2 + 0.1
    listed = [
        Step(
            "fails", python("print('FAILED tests/x.py::test_y'); print('more\\n' * 30); raise SystemExit(3)"), cores=0.1
        ),
        Step("needs it", python("print('never')"), after=("fails",), cores=0.1),
        Step("needs that", python("print('never')"), after=("needs it",), cores=0.1),
        Step("goes on", python("import time; time.sleep(0.7); print('whole')"), cores=two),
        Step("comes later", python("print('later')"), after=("goes on",), cores=two),
    ]
    assert not steps.run(listed, tmp_path)
    assert outcomes(tmp_path) == {
        "fails": "FAILED",
        "needs it": "not run",
        "needs that": "not run",
        "goes on": "passed",
        "comes later": "passed",
    }
    printed = capfd.readouterr().out
    assert printed.index("--- fails: FAILED") < printed.index("--- goes on: passed")
    assert "FAILED: fails, needs it, needs that\n" in printed
    assert printed.rstrip().endswith("=== tests that failed\nFAILED tests/x.py::test_y")
    assert printed.count("FAILED tests/x.py::test_y") == 3, "at its end, before the table and after it"
    assert "never" not in printed


def test_steps_run_beside_each_other_as_far_as_processors_carry_them(tmp_path):
    many = os.cpu_count()
    nap = python("import time; time.sleep(2)")
    listed = [Step(f"{number}", nap, cores=many / 2) for number in range(4)]
    assert steps.run(listed, tmp_path)
    began = sorted(step["began"] for step in json.loads((tmp_path / "steps.json").read_text())["steps"])
    assert began[1] - began[0] < 1.9 <= began[2] - began[0], "two at a time, or more than the machine has"


def test_a_killed_step_fails_and_says_so(tmp_path, capfd):
    assert not steps.run([Step("dies", python("import os; os.kill(os.getpid(), 9)"))], tmp_path)
    assert outcomes(tmp_path) == {"dies": "FAILED"}
    assert "[steps] killed by SIGKILL" in capfd.readouterr().out


def test_a_step_that_hangs_or_cannot_be_run_fails_and_the_others_end(tmp_path, capfd):
    listed = [
        Step("hangs", ["sleep", "100"], cores=0.1, seconds_max=0.5),
        Step("is missing", ["no-such-program"], cores=0.1),
        Step("runs", ["true"], cores=0.1),
    ]
    assert not steps.run(listed, tmp_path)
    assert outcomes(tmp_path) == {"hangs": "FAILED", "is missing": "FAILED", "runs": "passed"}
    printed = capfd.readouterr().out
    assert "still running after 0 s, and killed" in printed
    assert "no-such-program cannot be run: No such file or directory: make setup" in printed


def test_what_a_step_leaves_running_is_named_and_killed(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(steps, "GRACE_S", 0.2)
    # In a process group of its own, as cargo-nextest starts tests.
    child = f"import os; os.setpgid(0, 0); os.execvp('sleep', ['sleep', '{os.getpid()}'])"
    text = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    assert steps.run([Step("leaves", python(text))], tmp_path)
    assert f"left running, and killed: sleep {os.getpid()}" in capfd.readouterr().out


def test_a_second_run_in_the_checkout_is_refused(tmp_path):
    with (
        steps.alone(tmp_path),
        pytest.raises(SystemExit, match=f"process {os.getpid()} runs steps"),
        steps.alone(tmp_path),
    ):
        pass
    with steps.alone(tmp_path):
        pass


def test_a_run_of_some_steps_leaves_what_the_run_of_all_has_said(tmp_path, monkeypatch):
    listed = [Step("one", ["true"]), Step("two", ["true"])]
    for words in ([], ["two"]):
        monkeypatch.setattr(sys, "argv", ["steps", *words])
        with pytest.raises(SystemExit) as ended:
            steps.main(listed, tmp_path)
        assert ended.value.code == 0
    assert set(outcomes(tmp_path)) == {"one", "two"} and set(outcomes(tmp_path / "chosen")) == {"two"}


def test_a_step_that_needs_an_unknown_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'b' comes after"):
        steps.run([Step("b", ["true"], after=("a",))], tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_steps(tmp_path, number):
    child = tmp_path / "child"
    text = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import steps, pathlib\n"
        f"steps.PLACE = pathlib.Path({str(tmp_path)!r})\n"
        f"steps.main([steps.Step('long', ['bash', '-c', 'echo $$ >{child}; sleep 60'])], steps.PLACE)"
    )
    process = subprocess.Popen(python(text))
    until = time.monotonic() + 30
    while not (child.exists() and child.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    assert outcomes(tmp_path) == {"long": "interrupted"}
    # What ended is there until its new parent, which is busy, has taken note of it.
    until = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(int(child.read_text()), 0)
            time.sleep(0.05)


def test_words_choose_steps():
    listed = [
        Step("wheel", ["a"]),
        Step("pytest", ["b"], after=("wheel",)),
        Step("pytest, oldest", ["c"], after=("pytest",)),
    ]
    assert steps.chosen(listed, []) == listed
    assert steps.chosen(listed, ["oldest"]) == [listed[2]._replace(after=())]
    assert [step.after for step in steps.chosen(listed, ["pytest"])] == [(), ("pytest",)]
    for words in (["nothing"], ["pytest", "nothing"], [""]):
        with pytest.raises(ValueError, match=r"no step's name contains '(nothing)?'; they are:\n  wheel"):
            steps.chosen(listed, words)


DIVIDED = ("--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder")


def test_a_test_that_ends_its_process_or_hangs_is_named_once_and_all_others_run(tmp_path):
    nap = "import time, pytest\n@pytest.mark.parametrize('n', range(10))\ndef test_it(n): time.sleep(0.1)\n"
    dies = "import os\ndef test_before(): pass\ndef test_dies(): os.abort()\ndef test_after(): pass\n"
    hangs = "import time\ndef test_hangs(): time.sleep(99)\ndef test_after(): pass\n"
    for name, text in (("a", dies), ("b", nap), ("c", hangs), ("d", nap), ("e", nap)):
        (tmp_path / f"test_{name}.py").write_text(text)
    how = ["-p", "by_file", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=15", "-o", "addopts="]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *how, *DIVIDED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
    )
    assert "2 failed, 33 passed" in done.stdout, done.stdout
    assert "test_a.py::test_dies" in done.stdout and "test_c.py::test_hangs" in done.stdout, done.stdout
    import test as gate

    assert gate.BESIDE == DIVIDED


def test_the_lists_of_steps_stand():
    import campaigns
    import test as gate

    assert steps.checked([*gate.MADE, *gate.CHECKED]) and steps.checked(campaigns.STEPS)
