"""Leaves whose first axis ends in padding: what of regions lies before it, which lengths are of one thing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardfast import adapters
from shardfast.state.catalog import Flat, Layout, Region
from shardfast.state.padding import differ_by_padding, first_rows, other_padding, padded


@st.composite
def regions(draw):
    """A shape, and a box of it, a run in such a box, or a run of all."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True))
    kind = draw(st.sampled_from(["box", "run in a box", "run"]))
    if kind == "box":
        return shape, Region(offsets, lengths)
    size = math.prod(lengths) if kind == "run in a box" else math.prod(shape)
    start = draw(st.integers(0, size - 1))
    stop = draw(st.integers(start + 1, size))
    return shape, Flat(start, stop, Region(offsets, lengths) if kind == "run in a box" else None)


def elements(shape, region):
    """The numbers of a region's elements in the whole tensor, in order."""
    every = np.arange(math.prod(shape)).reshape(shape)
    if region is None:
        return []
    if isinstance(region, Flat) and region.box is None:
        return every.reshape(-1)[region.start : region.stop].tolist()
    box = region if isinstance(region, Region) else region.box
    inside = every[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))].reshape(-1)
    return inside.tolist() if isinstance(region, Region) else inside[region.start : region.stop].tolist()


@given(regions(), st.integers(0, 6))
def test_the_first_rows_of_a_region_are_where_its_elements_begin(drawn, rows):
    shape, region = drawn
    (first,) = first_rows(Layout("F32", shape, (region,)), rows)
    wanted = [number for number in elements(shape, region) if number < rows * math.prod(shape[1:])]
    assert elements(shape, first) == wanted == elements(shape, region)[: len(wanted)]
    assert (first is None) == (not wanted)


@pytest.mark.parametrize(
    ("there", "here", "is_one"),
    [
        (padded(50257, 50257), padded(50257, 50257), True),
        (padded(50257, 50257), padded(50256, 50256), False),
        (padded(50257, 50257), padded(50177, 50304), True),
        (padded(50257, 50257), padded(31873, 32000), False),
        (padded(49, 56), padded(1, 64), True),
        (padded(49, 56), padded(57, 64), False),
        ("", padded(1, 64), False),
        (padded(1, 64), "", False),
        ("TP 4", padded(1, 64), False),
    ],
)
def test_lengths_differ_by_padding_where_one_length_without_it_fits_both(there, here, is_one):
    assert differ_by_padding((56, 8), there, (64, 8), here) is is_one
    assert not differ_by_padding((56, 8), there, (64, 9), here)
    assert bool(other_padding(there, here)) is (there.startswith("Padded") and here.startswith("Padded"))


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_run_of_elements_becomes_0_in_any_strides(framework):
    whole = np.arange(1, 25, dtype=np.float32).reshape(4, 6)
    memory = torch.from_numpy(whole.copy()) if framework == "torch" else whole.copy()
    across, expected = memory.T, whole.T.copy()
    expected.reshape(-1)[5:11] = 0
    adapter = next(one for one in adapters.active() if one.is_tensor(across))
    adapter.clear(across, 5, 11)
    assert np.array_equal(np.asarray(memory).T, expected)
