"""Exact gradient bias on an enumerable policy: what each correction costs, with nothing sampled."""

import math

import pytest

from rlq.bridge import Correction
from tests.support.enumerable import GAPS, gradient_bias

SEQUENCE_IS = Correction.preset("rlq/sequence_is")


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("length", [1, 4])
def test_untruncated_sequence_weights_are_unbiased(gap, length):
    assert gradient_bias(SEQUENCE_IS, GAPS[gap], length=length).bias < 1e-6


def test_token_weights_are_unbiased_for_one_token_only():
    token = Correction.preset("rlq/is")
    assert gradient_bias(token, GAPS["nvfp4"], length=1).bias < 1e-6
    assert gradient_bias(token, GAPS["nvfp4"], length=4).bias > 0.01


def test_no_gap_means_no_bias_whatever_the_correction():
    for name in ("rlq/default", "rlq/none", "trl/sequence_mask", "verl/decoupled_geo_rs"):
        assert gradient_bias(Correction.preset(name), 0.0).bias < 1e-6


@pytest.mark.parametrize("gap", ["fp8", "nvfp4"])
def test_a_lower_cap_trades_variance_for_bias(gap):
    results = [
        gradient_bias(Correction(level="sequence", upper=cap, veto=None), GAPS[gap])
        for cap in (1.0, 1.5, 3.0, math.inf)
    ]
    biases, deviations = [r.bias for r in results], [r.deviation for r in results]
    assert biases == sorted(biases, reverse=True)
    assert deviations == sorted(deviations)
    assert biases[0] > biases[-1] + 1e-3


def test_uncorrected_bias_grows_with_the_gap():
    biases = [gradient_bias(Correction.preset("rlq/none"), GAPS[gap]).bias for gap in GAPS]
    assert biases == sorted(biases)
    assert biases[0] > 0.01
