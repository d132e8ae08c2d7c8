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
    assert printed.rstrip().endswith("FAILED: fails, needs it, needs that")
    assert printed.count("FAILED tests/x.py::test_y") == 2, "at its end, and once more at the end of all"
    assert "never" not in printed


def test_steps_run_beside_each_other_as_far_as_processors_carry_them(tmp_path):
    many = os.cpu_count()
    nap = python("import time; time.sleep(2)")
    listed = [Step(f"{number}", nap, cores=many / 2) for number in range(4)]
    assert steps.run(listed, tmp_path)
    began = sorted(step["began"] for step in json.loads((tmp_path / "steps.json").read_text())["steps"])
    assert began[1] - began[0] < 1.9 <= began[2] - began[0], "two at a time, or more than the machine has"


def test_a_killed_step_fails(tmp_path):
    assert not steps.run([Step("dies", python("import os; os.kill(os.getpid(), 9)"))], tmp_path)
    assert outcomes(tmp_path) == {"dies": "FAILED"}


def test_a_step_that_needs_an_unknown_one_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="'b' comes after"):
        steps.run([Step("b", ["true"], after=("a",))], tmp_path)


def test_a_signal_ends_the_steps(tmp_path):
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
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)


def test_words_choose_steps():
    listed = [
        Step("wheel", ["a"]),
        Step("pytest", ["b"], after=("wheel",)),
        Step("pytest, oldest", ["c"], after=("pytest",)),
    ]
    assert steps.chosen(listed, []) == listed
    assert steps.chosen(listed, ["oldest"]) == [listed[2]._replace(after=())]
    assert [step.after for step in steps.chosen(listed, ["pytest"])] == [(), ("pytest",)]
    assert steps.chosen(listed, ["nothing"]) == []
