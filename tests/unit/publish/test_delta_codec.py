"""What differs is found, and survives the streams."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlq.publish import codec


def sent(*tensors: tuple[np.ndarray, np.ndarray, int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Positions and values of tensors of some size, after a journey through the streams."""
    writer = codec.Writer()
    for where, values, size in tensors:
        writer.add(codec.Changes(where, values, size))
    reader = codec.Reader({name: memoryview(stream) for name, stream in writer.finish().items()})
    return [reader.take(where.size, size, values.dtype) for where, values, size in tensors]


@pytest.mark.parametrize("density", [1e-5, 1e-3, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_what_differs_is_found_and_survives(dtype, density):
    rng = np.random.default_rng(0)
    old = rng.integers(0, np.iinfo(dtype).max, 300_007, dtype, endpoint=True)
    moved = rng.random(old.size) < density
    new = old + moved * rng.integers(1, np.iinfo(dtype).max, old.size, dtype, endpoint=True)
    where, values = codec.differing(old, new)
    assert np.array_equal(where, np.flatnonzero(moved))
    assert np.array_equal(old[where] + values, new[where])
    for found in sent((where, values, old.size), (where[:1], values[:1], old.size)):
        assert np.array_equal(found[0], where[: found[0].size])
        assert np.array_equal(found[1], values[: found[1].size])


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, codec.COMPARED - 1, codec.COMPARED, codec.COMPARED + 1])
def test_the_last_element_is_compared_too(size):
    old = np.zeros(size, np.uint8)
    assert codec.differing(old, old)[0].size == 0
    if size:
        new = old.copy()
        new[-1] = 3
        where, values = codec.differing(old, new)
        assert where.tolist() == [size - 1]
        assert values.tolist() == [3]


def test_the_worked_example():
    writer = codec.Writer()
    changes = codec.Changes(np.array([3, 4, 300]), np.array([1, 255, 2], np.uint8), 1000)
    assert changes.gaps.tolist() == [3, 0, 295]
    assert changes.negative.tolist() == [False, True, False]
    assert changes.steps.tolist() == [0, 0, 1]
    writer.add(changes)
    streams = {name: codec._Inflated(memoryview(stream)) for name, stream in writer.finish().items()}
    assert streams["low"].take(3).tobytes().hex(" ") == "03 00 27"
    assert streams["high"].take(9).tobytes().hex(" ") == "00 00 01 00 00 00 00 00 00"
    assert streams["steps"].take(3).tobytes().hex(" ") == "00 00 01"


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 2**40), min_size=1, max_size=200), st.integers(0, 2**64 - 1))
def test_any_positions_survive(positions, seed):
    where = np.array(sorted(positions), np.int64)
    values = np.random.default_rng(seed).integers(1, 256, where.size, np.uint8)
    ((found, steps),) = sent((where, values, 2**41))
    assert np.array_equal(found, where)
    assert np.array_equal(steps, values)
