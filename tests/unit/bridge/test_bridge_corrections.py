"""Rules, levels, normalization, ESS cap, custom corrections, and numerics at the edges."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlq.bridge import Correction, LogRatio, RejectRule, correct
from rlq.errors import ConfigError

BASE = -2.0
STATISTICS = ("k1", "k2", "k3", "ratio", "abs", "prob_diff")
AGGREGATIONS = ("token", "sum", "mean", "max")


def run(ell, correction, mask=None, **kwargs):
    """`correct` on given log ratios, in float64, with the sampler at a constant log-prob."""
    ell = torch.as_tensor(ell, dtype=torch.float64)
    mask = torch.ones_like(ell, dtype=torch.bool) if mask is None else mask
    return correct(ell + BASE, torch.full_like(ell, BASE), mask, correction, **kwargs)


def ragged(rows=40, length=12, scale=0.4, seed=0):
    rng = np.random.default_rng(seed)
    ell = scale * rng.standard_normal((rows, length))
    mask = np.arange(length) < rng.integers(1, length + 1, (rows, 1))
    return torch.from_numpy(ell), torch.from_numpy(mask)


@settings(deadline=None, max_examples=60)
@given(
    ell=st.lists(st.floats(-3, 3), min_size=1, max_size=30),
    lower=st.floats(0.01, 0.99),
    upper=st.floats(1.01, 30),
    how=st.sampled_from(["mask", "ratio", "k1"]),
)
def test_asymmetric_band_keeps_exactly_the_ratios_inside(ell, lower, upper, how):
    # The sign of k1 is where one peer's code and its documentation part: 1/rho against rho in the band.
    if how == "mask":
        correction = Correction(mode="mask", lower=lower, upper=upper, veto=None)
    else:
        correction = Correction(mode="none", veto=None, reject=[RejectRule(how, "token", lower, upper)])
    keep = run([ell], correction).keep[0].numpy()
    rho = np.exp(np.asarray(ell) + BASE - BASE)
    sure = (abs(rho / lower - 1) > 1e-9) & (abs(rho / upper - 1) > 1e-9)
    assert np.array_equal(keep[sure], ((rho >= lower) & (rho <= upper))[sure])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_every_rule_against_its_definition(statistic, aggregation):
    ell, mask = ragged()
    bounds = {"k2": (-1, 0.1), "k3": (-1, 0.1), "prob_diff": (-0.03, 0.03), "abs": (0.0, 1.6)}
    lower, upper = bounds.get(statistic, (0.9, 1.5))
    rule = RejectRule(statistic, aggregation, lower, upper)
    out = run(ell, Correction(mode="none", veto=None, reject=[rule]), mask)
    e, m = ell.numpy() + BASE - BASE, mask.numpy()
    per_token = {
        "k1": -e,
        "ratio": e,
        "abs": np.exp(abs(e)),
        "k2": e**2 / 2,
        "k3": np.exp(e) - 1 - e,
        "prob_diff": np.exp(e + BASE) - np.exp(BASE),
    }[statistic]
    for i in range(len(e)):
        values = per_token[i][m[i]]
        stat = {"token": lambda v: v, "sum": np.sum, "mean": np.mean, "max": np.max}[aggregation](values)
        if statistic in ("k1", "ratio"):
            stat = np.exp(-stat if statistic == "k1" else stat)
        expected = np.broadcast_to((stat >= lower) & (stat <= upper), values.shape)
        assert np.array_equal(out.keep[i][mask[i]].numpy(), expected), i
    if aggregation != "token":
        dropped = (~out.keep & mask).any(-1)
        assert out.metrics["reject_seq_frac"] == pytest.approx(dropped.double().mean().item())
        assert 0 < out.metrics["reject_seq_frac"] < 1, "the case must reject some and keep some"


def test_rule_on_advantage_sign_acts_on_that_side_only():
    ell = torch.full((2, 3), 1.5)
    rule = RejectRule("ratio", "token", upper=2.0, advantage="positive")
    correction = Correction(mode="none", veto=None, reject=[rule])
    out = run(ell, correction, advantages=torch.tensor([1.0, -1.0]))
    assert out.keep.tolist() == [[False] * 3, [True] * 3]
    with pytest.raises(ConfigError, match="pass advantages"):
        run(ell, correction)


def test_segments_are_runs_of_the_mask():
    ell = torch.tensor([[0.1, 0.3, 9.0, -0.2, -0.4, -0.6]])
    mask = torch.tensor([[True, True, False, True, True, True]])
    out = run(ell, Correction(level="segment", upper=math.inf, veto=None), mask)
    expected = [math.exp(0.2)] * 2 + [0.0] + [math.exp(-0.4)] * 3
    assert out.weights[0].tolist() == pytest.approx(expected)


def test_long_sequence_underflow_is_bounded_and_reported():
    # 4,000 tokens at -0.03: exp(-120) is 0 in fp32. The weight is exp(-20), and the sequence is counted.
    learner = torch.full((1, 4000), -1.03)
    sampler, mask = torch.full((1, 4000), -1.0), torch.ones(1, 4000, dtype=torch.bool)
    out = correct(learner, sampler, mask, Correction(level="sequence"))
    assert out.weights[0, 0] == pytest.approx(math.exp(-20), rel=1e-6)
    assert out.metrics["bounded_seqs"] == 1
    assert out.metrics["bounded_tokens"] == 0
    geometric = correct(learner, sampler, mask, Correction(level="geometric"))
    assert geometric.weights[0, 0] == pytest.approx(math.exp(-0.03), rel=1e-6)


def test_one_token_sequence_is_the_same_at_every_level():
    ell = torch.tensor([[0.3], [-0.7]])
    weights = [run(ell, Correction(level=level)).weights for level in ("token", "sequence", "geometric", "segment")]
    assert all(torch.allclose(w, weights[0], rtol=1e-12) for w in weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_inputs_are_upcast_before_the_subtraction(dtype):
    learner, sampler = (torch.tensor([[x]], dtype=dtype) for x in (-17.25, -17.125))
    out = correct(learner, sampler, torch.tensor([[True]]), Correction())
    assert out.weights.dtype is torch.float32
    assert out.weights.item() == pytest.approx(math.exp(learner.double().item() - sampler.double().item()), rel=1e-6)


def test_batch_normalization_has_mean_one_over_tokens_or_sequences():
    ell, mask = ragged()
    token = run(ell, Correction(normalize="batch", veto=None), mask)
    assert token.weights[mask].mean().item() == pytest.approx(1)
    sequence = run(ell, Correction(level="sequence", normalize="batch", veto=None), mask)
    assert sequence.weights[:, 0].mean().item() == pytest.approx(1)


@pytest.mark.parametrize("denominator", ["fixed", "kept"])
def test_self_normalized_loss_is_the_weighted_mean(denominator):
    ell, mask = ragged()
    plain = Correction(mode="mask", lower=0.7, upper=1.5, veto=None, denominator=denominator)
    raw = run(ell, plain, mask)
    out = run(ell, replace(plain, normalize="self"), mask)
    x = torch.sin(torch.arange(ell.numel(), dtype=torch.float64)).view_as(ell)
    assert (out.weights * x).sum() / out.denominator == pytest.approx((raw.weights * x).sum() / raw.weights.sum())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ess_target_is_met_by_the_largest_cap_of_the_grid(level):
    ell, mask = ragged(rows=200, scale={"token": 0.8, "sequence": 0.3}[level])
    out = run(ell, Correction(level=level, upper=50.0, ess_target=0.8, veto=None), mask)
    assert 1 < out.upper < 50
    assert out.metrics["ess_applied"] >= 0.8
    step = 50.0 ** (1 / 511)
    wider = run(ell, Correction(level=level, upper=out.upper * step, veto=None), mask)
    assert wider.metrics["ess_applied"] < 0.8


def test_ess_target_that_no_cap_reaches_caps_at_one():
    ell = torch.tensor([[-8.0, 0.0, 0.0, -8.0]])
    out = run(ell, Correction(ess_target=0.99, veto=None))
    assert out.upper == 1
    assert out.metrics["ess_applied"] < 0.99


class Collective:
    """One rank's reducer: answers its first calls with known totals and keeps what the next call sends."""

    def __init__(self, totals):
        self.totals, self.sent = list(totals), None

    def _call(self, values, kind):
        if self.totals:
            return self.totals.pop(0)
        self.sent = self.sent or (values, kind)
        return values

    def sum(self, values):
        return self._call(values, "sum")

    def max(self, values):
        return self._call(values, "amax")


def on_ranks(ell, mask, correction, ranks):
    """Run `correct` on every rank, again and again, until each collective has been answered with its total."""
    totals = []
    while True:
        reducers = [Collective(totals) for _ in range(ranks)]
        outs = [
            run(e, correction, m, reduce=r)
            for e, m, r in zip(ell.chunk(ranks), mask.chunk(ranks), reducers, strict=True)
        ]
        if reducers[0].sent is None:
            return outs
        sent = [r.sent for r in reducers if r.sent is not None]
        combine = getattr(torch.stack([values for values, _ in sent]), sent[0][1])
        totals.append(combine(0))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"level": "sequence", "normalize": "batch"},
        {"mode": "mask", "lower": 0.8, "upper": 1.3, "normalize": "self"},
        {"upper": 20.0, "ess_target": 0.9},
        {"denominator": "kept", "reject": [RejectRule("k3", "mean", upper=0.1)]},
    ],
)
def test_several_ranks_equal_one(fields):
    ell, mask = ragged(rows=48)
    correction = Correction(**fields)
    one, many = run(ell, correction, mask), on_ranks(ell, mask, correction, ranks=3)
    assert torch.allclose(torch.cat([o.weights for o in many]), one.weights, rtol=1e-12)
    for out in many:
        assert out.metrics == pytest.approx(one.metrics, rel=1e-12, abs=1e-15)
        assert (out.denominator, out.upper) == (one.denominator, one.upper)


def square_root(ratio: LogRatio) -> torch.Tensor:
    return ratio.rho_BT.sqrt()


def attached(ratio: LogRatio) -> torch.Tensor:
    return ratio.rho_BT.requires_grad_()


def negative(ratio: LogRatio) -> torch.Tensor:
    return -ratio.rho_BT


def one_per_sequence(ratio: LogRatio) -> torch.Tensor:
    return ratio.sum_B


def not_a_number(ratio: LogRatio) -> torch.Tensor:
    return ratio.rho_BT * math.nan


def two_arguments(ratio: LogRatio, power: float) -> torch.Tensor:
    return ratio.rho_BT**power


def test_weights_of_ones_own_are_used_and_checked():
    ell, mask = ragged()
    out = run(ell, Correction(custom=f"{__name__}.square_root"), mask)
    assert torch.allclose(out.weights[mask], (ell[mask] / 2).exp(), rtol=1e-12)
    for function in (attached, negative, one_per_sequence, not_a_number):
        with pytest.raises(ConfigError, match=function.__name__):
            run(ell, Correction(custom=f"{__name__}.{function.__name__}"), mask)
    with pytest.raises(ConfigError, match="not a function of one argument"):
        Correction(custom=f"{__name__}.two_arguments")


@pytest.mark.parametrize(
    "fields",
    [
        {"reject": []},
        {"reject": "k3"},
        {"reject": [{"statistic": "k3"}]},
        {"reject": [{"statistic": "k3", "uper": 0.1}]},
        {"reject": [{"statistic": "k4", "upper": 0.1}]},
        {"reject": [{"statistic": "ratio", "upper": 0.7}]},
        {"reject": [{"statistic": "ratio", "lower": -0.5, "upper": 0.5}]},
        {"reject": [{"statistic": "ratio", "lower": -0.7, "upper": 1.5}]},
        {"reject": [{"statistic": "k2", "lower": 0.1, "upper": 0.5}]},
        {"reject": [{"statistic": "ratio", "lower": 2.0, "upper": 1.5}]},
        {"ess_target": 1.5},
        {"ess_target": 0.5, "mode": "mask"},
        {"normalize": "mean"},
        {"custom": "no.such.weights"},
        {"custom": "weights"},
        {"custom": ""},
    ],
)
def test_settings_that_cannot_mean_anything_are_refused(fields):
    with pytest.raises(ConfigError):
        Correction(**fields)


def test_quantiles_are_within_the_stated_resolution():
    rng = np.random.default_rng(3)
    for scale in (1e-4, 1e-2, 0.3, 3.0):
        ell = torch.from_numpy(scale * rng.standard_normal((50, 400)))
        metrics = run(ell, Correction(veto=None)).metrics
        exact = np.quantile((ell + BASE - BASE).numpy(), [0.01, 0.99], method="inverted_cdf")
        found = [math.log(metrics["ratio_p01"]), math.log(metrics["ratio_p99"])]
        assert found == pytest.approx(exact, rel=1 / 128, abs=2.0**-20)
