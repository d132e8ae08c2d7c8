"""The NumPy adapter: arrays as they lie in memory, without a copy where that is possible."""

import numpy as np
import pytest
from shardfast.adapters.numpy import DTYPES, NumpyAdapter
from shardfast.state.catalog import Refused
from shardfast.testing import check_tensor, restore

ADAPTER = NumpyAdapter()


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(np, name)])
def test_every_dtype_is_taken_bit_by_bit(name):
    dtype = np.dtype(name)
    array = (np.arange(24 * dtype.itemsize, dtype=np.uint8) % (2 if name == "bool" else 251)).view(dtype).reshape(4, 6)
    assert ADAPTER.layout(array).dtype == DTYPES[name]
    assert check_tensor(ADAPTER, array) == array.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(24.0).reshape(4, 6)[::-2, 1::3],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(2.5),
        np.zeros((3, 0, 2)),
    ],
    ids=["transposed", "backwards", "fortran", "zero-dimensional", "empty"],
)
def test_views_are_described_as_they_lie(array):
    assert check_tensor(ADAPTER, array) == array.tobytes()
    pointers = [memory.pointer for memory in ADAPTER.source(array).memory]
    assert pointers == ([array.ctypes.data] if array.size else []), "no copy"


def test_foreign_byte_order_is_converted():
    array = np.arange(4, dtype=">i4")
    assert check_tensor(ADAPTER, array) == np.arange(4, dtype="<i4").tobytes()
    restore(ADAPTER, array, np.arange(4, 8, dtype="<i8").tobytes(), "I64")
    assert array.tolist() == [4, 5, 6, 7]


def test_types_that_numpy_has_not_are_refused():
    with pytest.raises(Refused, match="NumPy has no type for BF16"):
        ADAPTER.allocate("BF16", (2,))


def test_what_cannot_be_loaded_into_is_refused():
    fixed = np.ones(3)
    fixed.flags.writeable = False
    for array, why in [(fixed, "read-only"), (np.lib.stride_tricks.as_strided(np.ones(1), (3,), (0,)), "share memory")]:
        with pytest.raises(Refused, match=why):
            ADAPTER.target(array, "F64")
    with pytest.raises(Refused, match="read-only"):
        ADAPTER.fill(fixed, np.zeros(3))
    with pytest.raises(Refused, match=r"float32 \[3\] where the state has one of float64 \[3\]"):
        ADAPTER.fill(np.ones(3), np.zeros(3, dtype=np.float32))
    assert fixed.tolist() == [1, 1, 1]


def test_only_arrays_of_plain_numbers_are_tensors():
    for other in [
        np.array(["a"]),
        np.array([{}]),
        np.ma.array([1]),
        np.zeros(1, dtype="i4,i4"),
        np.float64(1),
        np.array([1j]),
    ]:
        assert not ADAPTER.is_tensor(other)


def test_identity_is_same_elements_in_same_memory():
    one = np.arange(12.0)
    assert ADAPTER.identity(one) == ADAPTER.identity(one[:])
    for other in (one.copy(), one[:6], one.reshape(3, 4), one.view(np.int64), one[::-1]):
        assert ADAPTER.identity(one) != ADAPTER.identity(other)
