"""Megatron's own training loop on Shardfast."""

from pathlib import Path

import pytest
import shardfast as sf

pytest.importorskip("megatron.training", reason="this Megatron-Core has no megatron.training (0.17 and later have)")

from loops import die_in_a_save, train


def saving(place, *more):
    return ["--save", str(place), "--load", str(place), "--save-interval", "2", *more]


def tracker(place):
    return (place / "latest_checkpointed_iteration.txt").read_text()


def test_a_training_that_was_killed_in_a_save_goes_on(ranks, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = ranks(2)(train, saving(whole))
    with pytest.raises(AssertionError, match="died without a word"):
        ranks(2)(die_in_a_save, str(killed), 4, saving(killed))
    assert (killed / "iter_0000004").is_dir()
    with pytest.raises(sf.NotFound):
        sf.mapped(killed / "iter_0000004")
    assert tracker(killed) == "2"
    resumed = ranks(2)(train, saving(killed))
    for (losses, _), (of_all, _) in zip(resumed, expected, strict=True):
        assert len(losses) == 4 and losses == of_all[2:]
    assert tracker(killed) == tracker(whole) == "6"
