"""Megatron's own training loop on Shardfast."""

import pytest
import shardfast as sf

pytest.importorskip(
    "megatron.training",
    reason="megatron.training cannot be imported: megatron-core has it from 0.17 on, before 0.19 with more packages",
)

from loops import die_in_a_save, train, train_until_sigterm

LAYOUTS = {
    "dp": [],
    "tp": ["--tensor-model-parallel-size", "2"],
    "pp": ["--pipeline-model-parallel-size", "2"],
    "overlap": ["--overlap-grad-reduce", "--overlap-param-gather"],
    "ep": [
        *("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "allgather"),
        *("--expert-model-parallel-size", "2"),
    ],
}
ASYNC = ["--async-save", "--use-persistent-ckpt-worker"]
_whole = {}


def whole(ranks, layout):
    """The losses of a training that nothing interrupts."""
    if layout not in _whole:
        _whole[layout] = [losses for losses, _ in ranks(2)(train, LAYOUTS[layout])]
    return _whole[layout]


def saving(place, *more, interval=2):
    return ["--save", str(place), "--load", str(place), "--save-interval", str(interval), *more]


def tracker(place):
    return (place / "latest_checkpointed_iteration.txt").read_text()


def expect_rest(resumed, of_all):
    """Resumed trainings have the last losses of whole ones."""
    for (losses, _), every in zip(resumed, of_all, strict=True):
        assert losses == every[len(every) - len(losses) :]
        assert bool(losses) == bool(every)


campaign = pytest.mark.campaign
OTHERS = [
    ("dp", "tp"),
    ("dp", "pp"),
    ("tp", "pp"),
    ("pp", "tp"),
    ("pp", "dp"),
]  # Megatron loads no other expert parallelism


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("dp", []),
        ("tp", ASYNC),
        pytest.param("pp", [], marks=campaign),
        pytest.param("pp", ASYNC, marks=campaign),
        pytest.param("ep", ASYNC, marks=campaign),
        pytest.param("overlap", ASYNC, marks=campaign),
    ],
    ids=lambda value: value if isinstance(value, str) else "async" if value else "sync",
)
def test_a_training_that_was_killed_in_a_save_goes_on(ranks, tmp_path, layout, how):
    arguments = saving(tmp_path, *LAYOUTS[layout], *how)
    with pytest.raises(AssertionError, match=r"died without a word|Connection (closed|reset) by peer"):
        ranks(2)(die_in_a_save, str(tmp_path), 4, arguments)
    assert (tmp_path / "iter_0000004").is_dir()
    with pytest.raises(sf.NotFound):
        sf.mapped(tmp_path / "iter_0000004")
    assert tracker(tmp_path) == "2"
    resumed = ranks(2)(train, arguments)
    assert max(len(losses) for losses, _ in resumed) == (8 if layout in ("tp", "pp") else 4)
    expect_rest(resumed, whole(ranks, layout))
    assert tracker(tmp_path) == "6"


def test_sigterm_saves_the_iteration_and_ends(ranks, tmp_path):
    arguments = saving(tmp_path, *ASYNC, "--exit-signal-handler", interval=100)
    ended = ranks(2)(train_until_sigterm, 3, arguments)
    assert [(len(losses), code) for losses, code in ended] == [(3, 0), (3, 0)]
    assert tracker(tmp_path) == "3"
    resumed = ranks(2)(train, arguments)
    assert {len(losses) for losses, _ in resumed} == {3}
    expect_rest(resumed, whole(ranks, "dp"))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("tp", "dp"),
        *(pytest.param(*pair, marks=campaign) for pair in OTHERS),
    ],
)
def test_another_layout_goes_on_as_after_megatrons_own_load(ranks, tmp_path, saved, loaded):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for place, is_attached in ((ours, True), (theirs, False)):
        ranks(2)(train, saving(place, *LAYOUTS[saved], "--exit-interval", "4"), is_attached)
        assert tracker(place) == "4"
    expected = ranks(2)(train, ["--load", str(theirs), *LAYOUTS[loaded]], False)
    for place in (ours, theirs):  # a directory that Megatron wrote is loaded by Megatron
        resumed = ranks(2)(train, ["--load", str(place), *LAYOUTS[loaded]])
        assert resumed == expected and any(losses for losses, _ in resumed)
