"""Where a rank of Megatron-Core stands, as its parallel state says it."""

import pytest
from jobs import Kind, Layout, begin, build
from megatron.core import parallel_state
from shardfast import adapters
from shardfast.state.coordinates import coordinates_of, shown_by
from shardfast.state.entries import walk
from test_layouts import no_collectives


def stands(rank, world, layout, experts):
    """What is said of this rank for a state of that layout, and for one without a model."""
    begin(layout)
    chunks, optimizer = build(layout, Kind(experts=experts))
    with no_collectives():
        walked = walk({"model": chunks, "optimizer": optimizer})
        said = coordinates_of(shown_by(walked.entries), walked.adapters)
    own = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
    }
    return said, own, coordinates_of([], adapters.active())


@pytest.mark.parametrize(
    ("layout", "experts", "names"),
    [
        pytest.param(Layout(tp=2, pp=2), 0, ["tp", "pp"], marks=pytest.mark.smoke),
        (Layout(tp=2), 0, ["tp", "dp"]),
        (Layout(ep=2), 4, ["ep", "dp"]),
        (Layout(), 0, ["dp"]),
    ],
    ids=str,
)
def test_coordinates_are_those_of_parallel_state(ranks, layout, experts, names):
    for said, own, of_nothing in ranks(4)(stands, layout, experts):
        assert said == [(name, own[name]) for name in names]
        assert of_nothing == []
