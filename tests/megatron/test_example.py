"""The example: saved with tensor parallelism, resumed with pipeline parallelism, without a stand-in for a device."""

import contextlib
import io
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import megatron_gpt


def printed(rank, world, run, tp, pp, steps):
    """The losses that this rank prints, by step."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        megatron_gpt.train(run, tp, pp, steps)
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", said.getvalue())}


def test_a_training_changes_from_tensor_to_pipeline_parallelism(ranks, tmp_path):
    whole, _ = ranks(2)(printed, str(tmp_path / "whole"), 2, 1, 14)
    ranks(2)(printed, str(tmp_path / "run"), 2, 1, 10)
    nothing, rest = ranks(2)(printed, str(tmp_path / "run"), 1, 2, 14)
    assert list(whole) == list(range(1, 15)) and list(rest) == list(range(11, 15)) and not nothing
    assert whole[14] < whole[1] - 0.5
    assert all(abs(loss - whole[step]) < 2e-4 for step, loss in rest.items()), (whole, rest)
