"""What is read at each save and set at each load: functions of the program's, and the random generators."""

import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import shardfast as sf
import torch
from torch import nn


class Sampler:
    """Counts what it gave out; a plain value of it in the state would be stale at once."""

    def __init__(self):
        self.consumed = 0

    def read(self):
        return {"consumed": self.consumed}

    def set(self, state):
        self.consumed = state["consumed"]


SAVES = {
    "save": lambda url, state: sf.save(url, state),
    "save_async": lambda url, state: sf.save_async(url, state).committed(),
}


@pytest.mark.parametrize("verb", SAVES)
@pytest.mark.parametrize("wrap", [sf.PerRank, lambda value: value], ids=["per rank", "plain"])
def test_functions_are_called_at_each_save_and_load(tmp_path, verb, wrap):
    sampler, model = Sampler(), nn.Linear(2, 2)
    state = {"model": model, "extra": {"sampler": wrap(sf.Stateful(sampler.read, sampler.set)), "n": 1}}
    for step in range(4):  # from the second on the state is known
        sampler.consumed = 10 * step
        SAVES[verb](tmp_path / str(step), state)
    alone = {"sampler": wrap(sf.Stateful(sampler.read, sampler.set))}
    SAVES[verb](tmp_path / "alone", alone)
    for step in range(4):
        sf.load(tmp_path / str(step), state)
        assert sampler.consumed == 10 * step
    sf.load(tmp_path / "alone", alone)
    assert sampler.consumed == 30


def test_a_checkpointer_reads_what_is_due_and_once_before(tmp_path):
    """Its first step looks at the whole state, so that the first save finds it known."""
    calls, box = [], [0]

    def read():
        calls.append(box[0])
        return box[0]

    state = {"extra": {"box": sf.Stateful(read, lambda value: box.__setitem__(0, value))}}
    with sf.Checkpointer(tmp_path, every=sf.steps(2)) as ckpt:
        for step in range(1, 7):
            box[0] = step
            ckpt.step(step, state)
    assert calls == [1, 2, 4, 6]
    box[0] = 99
    assert sf.Checkpointer(tmp_path).restore(state) == 6
    assert box[0] == 6


def test_any_value_may_be_read(tmp_path):
    values = [
        None,
        3,
        "text",
        [1, (2, {3})],
        torch.tensor(2.5),
        torch.arange(400_000.0),
        np.arange(4),
        {"a": torch.ones(2), "b": {"c": torch.ones(300_000)}},
    ]
    for number, value in enumerate(values):
        for wrap in (sf.PerRank, lambda value: value):
            got = []
            url = tmp_path / f"{number}{wrap is sf.PerRank}"
            sf.save(url, {"extra": {"it": wrap(sf.Stateful(lambda value=value: value, got.append))}})
            sf.load(url, {"extra": {"it": wrap(sf.Stateful(lambda: None, got.append))}})
            assert repr(got) == repr([value])
            with sf.mapped(url) as checkpoint:
                assert repr(checkpoint.value("extra/it")) == repr(value)


def test_what_a_function_reads_is_copied_in_the_call(tmp_path):
    live = torch.zeros(600_000)
    state = {"extra": {"it": sf.Stateful(lambda: {"live": live, "n": 1}, lambda value: None)}}
    pending = sf.save_async(tmp_path / "one", state)
    live.fill_(7)
    pending.committed()
    with sf.mapped(tmp_path / "one") as checkpoint:
        assert checkpoint.value("extra/it")["live"].sum() == 0


def test_functions_are_called_last_and_only_when_everything_was_made(tmp_path):
    order = []

    class Loader:
        def state_dict(self):
            return {"n": 1}

        def load_state_dict(self, state):
            order.append("loader")

    def state(value):
        extra = {"a": sf.Stateful(lambda: 1, lambda value: order.append("set")), "b": Loader(), "c": value}
        return {"extra": extra}

    sf.save(tmp_path / "good", state(3))
    sf.load(tmp_path / "good", state(None))
    assert order == ["loader", "set"]
    order.clear()
    from shardfast._native import Tagged

    sf.save(tmp_path / "bad", state(Tagged("date", [1, 99, 1])))
    with pytest.raises(sf.Corrupt, match=r"extra\.c: no date"):
        sf.load(tmp_path / "bad", state(None))
    assert order == []


def test_what_is_no_function_is_refused():
    for pair in [(1, print), (print, None)]:
        with pytest.raises(sf.Invalid, match="expected two functions"):
            sf.Stateful(*pair)
    with pytest.raises(sf.Invalid, match=r"extra\.a\[0\]: a Stateful keeps its state in state_dict\(\)"):
        sf.save("memory://refused/1", {"extra": {"a": [sf.Stateful(int, print)]}})


# The random generators


def draw():
    return random.random(), float(np.random.rand()), torch.rand(2).tolist(), float(np.random.normal())


def test_the_generators_go_on_where_the_save_was_made(tmp_path):
    state = {"model": nn.Linear(2, 2), "extra": {"random": sf.random_state(), "args": {"lr": 1e-3}}}
    expected = []
    for step in range(3):
        np.random.normal()  # leaves half a pair behind
        sf.save(tmp_path / str(step), state)
        expected.append([draw() for _ in range(3)])
    for step in (2, 0, 1):
        state["extra"]["random"] = sf.random_state()
        sf.load(tmp_path / str(step), state)
        assert [draw() for _ in range(3)] == expected[step]


def train(url, stop, losses):
    """The loop of README.md, with dropout and data that depend on the generators."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "extra": {"random": sf.random_state()}}
    with sf.Checkpointer(url, every=sf.steps(2)) as ckpt:
        for step in range(ckpt.restore(state), stop):
            loss = model(torch.randn(8, 4) + random.random() + np.random.rand()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            ckpt.step(step + 1, state)


def test_a_run_that_is_cut_off_goes_on_as_if_it_had_not_been(tmp_path):
    whole, cut = {}, {}
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    train(tmp_path / "whole", 9, whole)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    for stop in (5, 7, 9):  # each time from the save before
        train(tmp_path / "cut", stop, cut)
    assert cut == whole


def own_generators(rank, world, url):
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    sf.save(url, {"extra": {"random": sf.random_state()}})
    expected = draw()
    sf.load(url, {"extra": {"random": sf.random_state()}})
    assert draw() == expected
    return expected


def test_each_rank_has_its_own_and_other_ranks_choose(ranks, tmp_path):
    url = str(tmp_path / "one")
    first, second = ranks(2)(own_generators, url)
    assert first != second
    state = {"extra": {"random": sf.random_state()}}
    with pytest.raises(sf.Invalid, match=r'per rank: extra/random was saved by 2 ranks(.|\n)*per_rank="rank0"'):
        sf.load(url, state)
    for choice in ("rank0", "index"):
        sf.load(url, state, per_rank=choice)
        assert draw() == first


SCRIPT = """
import random, shardfast as sf
{before}
state = {{"extra": {{"random": sf.random_state()}}}}
{after}
"""


def script(before, after, **kwargs):
    text = SCRIPT.format(before=before, after=textwrap.dedent(after))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, **kwargs)
    assert done.returncode == 0, done.stderr
    return done


def test_a_framework_that_was_there_and_is_not_now_is_named(tmp_path):
    """And one that is there now and was not, too, in the log."""
    for framework in ("numpy", "torch"):
        script(f"import {framework}", f"sf.save({str(tmp_path / framework)!r}, state)")
        after = f"""
            random.seed(5)
            try:
                sf.load({str(tmp_path / framework)!r}, state)
            except sf.Unsupported as error:
                print(error)
            assert random.random() == random.Random(5).random()
        """
        told = script("", after).stdout
        assert "extra.random" in told
        assert f"import {framework} before loading" in told
    script("random.seed(7)", f"sf.save({str(tmp_path / 'plain')!r}, state)")
    after = f"""
        sf.load({str(tmp_path / "plain")!r}, state)
        assert random.random() == random.Random(7).random()
    """
    assert script("", after).stderr == ""
    assert "no state of the generators of numpy; they stay" in script("import numpy", after).stderr


def save_stored(url, **stored):
    sf.save(url, {"extra": {"random": {"python": random.getstate(), **stored}}})


def test_states_that_no_generator_takes_change_none(tmp_path):
    numpy = np.random.get_state(legacy=False)
    stored = {
        "no state at all": {"python": 3},
        "half a state": {"torch": {"cpu": torch.zeros(7, dtype=torch.uint8)}},
        "no state of torch's": {"torch": 3},
        "no tensor": {"torch": {"cpu": [1, 2]}},
        "a short key": {"numpy": {**numpy, "state": {"key": np.zeros(3, np.uint32), "pos": 1}}},
        "another generator": {"numpy": {**numpy, "bit_generator": "PCG64"}},
        "a generator unknown": {"numpy": {**numpy, "bit_generator": "os"}},
        "another framework": {"jax": 1},
    }
    for name, of in stored.items():
        save_stored(tmp_path / name, **of)
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        expected = draw()
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        with pytest.raises((sf.Corrupt, sf.Invalid), match=r"^extra\.random: "):
            sf.load(tmp_path / name, {"extra": {"random": sf.random_state()}})
        assert draw() == expected, name


class Devices:
    """CUDA's generators as torch shows them, of any number of devices."""

    def __init__(self, monkeypatch, count):
        self.states = [torch.full((16,), device, dtype=torch.uint8) for device in range(count)]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(self.states))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [one.clone() for one in self.states])
        monkeypatch.setattr(torch.cuda, "set_rng_state_all", self.set)

    def set(self, states):
        self.states = list(states)


def test_devices_have_generators_too_and_their_number_must_be_the_same(tmp_path, monkeypatch, caplog):
    state = {"extra": {"random": sf.random_state()}}
    devices = Devices(monkeypatch, 2)
    sf.save(tmp_path / "two", state)
    devices.states = [torch.zeros(16, dtype=torch.uint8)] * 2
    sf.load(tmp_path / "two", state)
    assert [one.tolist() for one in devices.states] == [[0] * 16, [1] * 16]
    for count in (0, 1, 3):
        Devices(monkeypatch, count)
        torch.manual_seed(5)
        with pytest.raises(sf.Invalid, match=rf"^extra\.random: .* of 2 CUDA devices, and this process sees {count}: "):
            sf.load(tmp_path / "two", state)
        assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(5)).item()
    Devices(monkeypatch, 0)
    sf.save(tmp_path / "none", state)
    Devices(monkeypatch, 1)
    sf.load(tmp_path / "none", state)
    assert "the generators of torch on CUDA; they stay as they are" in caplog.text
