"""What `import shardfast` costs and offers, and how its files are entered."""

import collections
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import shardfast as sf
from shardfast import verbs

IMPORT_MS_MAX = 50


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_is_cheap_and_loads_no_framework():
    code = (
        "import sys, time; start = time.process_time(); import shardfast; "
        "print((time.process_time() - start) * 1000, *(name in sys.modules for name in ('torch', 'numpy')))"
    )
    runs = [python(code).split() for _ in range(3)]
    assert all(run[1:] == ["False", "False"] for run in runs)
    assert min(float(run[0]) for run in runs) < IMPORT_MS_MAX


def test_a_save_and_a_load_need_no_framework(tmp_path):
    code = (
        f"import sys, shardfast as sf; url = {str(tmp_path / 'one')!r}; sf.save(url, {{'extra': {{'step': (1, 2)}}}}); "
        "state = {'extra': {'step': None}}; sf.load(url, state); "
        "print(state['extra']['step'], *(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert python(code).split() == ["(1,", "2)", "False", "False"]


@pytest.mark.parametrize("name", sf.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(sf, name).__doc__
    assert name in dir(sf)


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="module 'shardfast' has no attribute 'lod'"):
        sf.lod  # noqa: B018


def test_errors_are_of_one_family():
    kinds = [getattr(sf, name) for name in sf.__all__ if isinstance(getattr(sf, name), type)]
    # That a training stops as it was told to is no error.
    errors = [kind for kind in kinds if issubclass(kind, Exception) and kind is not sf.Stopping]
    assert len(errors) == 10
    assert all(issubclass(kind, sf.Error) for kind in errors)
    for kind in errors:  # they survive the way to another process
        copy = pickle.loads(pickle.dumps(kind("what happened")))
        assert (type(copy), copy.args) == (kind, ("what happened",))


def test_a_load_enters_no_file_more_than_three_times(tmp_path):
    """Who reads ``load`` from top to bottom opens each of the files it calls a few times only."""
    state = {"extra": {"step": 1}}
    sf.save(tmp_path / "one", state)
    entered: collections.Counter[str] = collections.Counter()

    def count(frame, event, argument):
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        if event == "call" and caller == verbs.__file__ != frame.f_code.co_filename:
            entered[frame.f_code.co_filename] += 1

    sys.setprofile(count)
    try:
        sf.load(tmp_path / "one", state)
    finally:
        sys.setprofile(None)
    ours = {Path(name).name: times for name, times in entered.items() if "shardfast" in Path(name).parts}
    assert {"match.py", "install.py"} <= set(ours)
    assert max(ours.values()) <= 3, ours
