"""Positions survive being packed, and the compiled loops write what numpy's do."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlq.publish import codec as delta_codec


@pytest.fixture(params=["numba", "numpy"])
def loops(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(delta_codec, "_kernels", lambda: None)
    else:
        assert delta_codec._kernels() is not None


def unpacked(classes: np.ndarray, fields: bytes, piece: int) -> tuple[np.ndarray, np.ndarray]:
    where, flags = np.empty(classes.size, np.int64), np.empty(classes.size, np.uint8)
    bit, last = 0, -1
    for start in range(0, classes.size, piece):
        part = slice(start, start + piece)
        stream = np.frombuffer(fields, np.uint8)
        bit = delta_codec.unpack(classes[part], stream, bit, last, where[part], flags[part])
        last = int(where[part][-1])
    assert bit <= 8 * len(fields) < bit + 8
    return where, flags


@pytest.mark.parametrize("density", [1e-5, 1e-3, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_what_differs_is_found_and_survives(loops, dtype, density):
    rng = np.random.default_rng(0)
    old = rng.integers(0, np.iinfo(dtype).max, 300_007, dtype, endpoint=True)
    moved = rng.random(old.size) < density
    new = old + moved * rng.integers(1, np.iinfo(dtype).max, old.size, dtype, endpoint=True)
    where, values = delta_codec.differing(old, new)
    assert np.array_equal(where, np.flatnonzero(moved))
    assert np.array_equal(old[where] + values, new[where])
    flags = rng.integers(0, 2, where.size, np.uint8)
    classes, fields = delta_codec.pack(where, flags)
    for found, sent in zip(unpacked(classes, fields, delta_codec.PIECE), (where, flags), strict=True):
        assert np.array_equal(found, sent)


def test_nothing_differs(loops):
    where, values = delta_codec.differing(np.zeros(40, np.uint8), np.zeros(40, np.uint8))
    assert (where.size, values.size, values.dtype) == (0, 0, np.uint8)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 2**40), min_size=1, max_size=200), st.integers(0, 2**64 - 1), st.integers(1, 50))
def test_any_positions_survive_both_loops(positions, seed, piece):
    where = np.array(sorted(positions), np.int64)
    flags = np.random.default_rng(seed).integers(0, 2, where.size, np.uint8)
    packed = []
    for loops in (delta_codec._kernels, lambda: None):
        with mock.patch.object(delta_codec, "_kernels", loops):
            classes, fields = delta_codec.pack(where, flags)
            packed.append((classes.tobytes(), fields))
            found, raised = unpacked(classes, fields, piece)
        assert np.array_equal(found, where)
        assert np.array_equal(raised, flags)
    assert packed[0] == packed[1]
