"""Identities of `correct`: what must hold for any batch, before any number is pinned."""

import math

import pytest
import torch

from rlq.bridge import MAX_LOG_RATIO, METRIC_NAMES, Correction, correct
from rlq.errors import ConfigError


def ragged(seed=0, batch=6, length=40, scale=0.3):
    generator = torch.Generator().manual_seed(seed)
    sampler = -3 * torch.rand(batch, length, generator=generator) - 0.5
    learner = sampler + scale * torch.randn(batch, length, generator=generator)
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
    return learner.clamp(max=0), sampler, torch.arange(length) < lengths


def test_equal_distributions_give_weight_one_and_no_mismatch():
    learner, _, mask = ragged()
    out = correct(learner, learner.clone(), mask, Correction())
    assert torch.equal(out.weights, mask.float())
    assert torch.equal(out.keep, mask)
    zero = {"sampler_kl_k1", "sampler_kl_k2", "sampler_kl_k3", "logratio_abs_max", "prob_diff_max", "chi2_token"}
    assert all(out.metrics[name] == 0 for name in zero)
    ones = ("ratio_mean", "ess_token", "ess_seq", "ppl_ratio", "kept_token_frac")
    assert [out.metrics[name] for name in ones] == pytest.approx([1] * 5, rel=1e-7)


def test_truncation_at_infinity_is_plain_importance_weighting():
    learner, sampler, mask = ragged()
    out = correct(learner, sampler, mask, Correction(upper=math.inf, veto=None))
    assert torch.equal(out.weights[mask], (learner - sampler).exp()[mask])
    assert set(out.metrics) == set(METRIC_NAMES)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_micro_batches_merge_into_the_batch(level):
    learner, sampler, mask = ragged(batch=8)
    correction = Correction(level=level, mode="mask", lower=0.8, upper=1.25)
    whole = correct(learner, sampler, mask, correction)
    parts = [correct(learner[i : i + 2], sampler[i : i + 2], mask[i : i + 2], correction) for i in range(0, 8, 2)]
    assert torch.equal(whole.weights, torch.cat([p.weights for p in parts]))
    merged = parts[0].sums
    for part in parts[1:]:
        merged = merged.merge(part.sums)
    assert merged.metrics() == pytest.approx(whole.metrics, rel=1e-12, abs=1e-15)


def test_masked_places_and_padding_side_never_matter():
    learner, sampler, mask = ragged()
    clean = correct(learner, sampler, mask, Correction())
    for junk in (math.nan, -math.inf, math.inf, 50.0):
        dirty = correct(torch.where(mask, learner, -junk), torch.where(mask, sampler, junk), mask, Correction())
        assert torch.equal(dirty.weights, clean.weights)
        assert dirty.metrics == clean.metrics
    flipped = correct(learner.flip(1), sampler.flip(1), mask.flip(1), Correction())
    assert torch.equal(flipped.weights.flip(1), clean.weights)
    assert flipped.metrics == pytest.approx(clean.metrics, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf, -9999.0])
def test_nonfinite_token_leaves_loss_and_denominator_and_is_counted(bad):
    learner, sampler, mask = ragged()
    sampler[0, 0] = bad
    out = correct(learner, sampler, mask, Correction())
    assert out.metrics["nonfinite_tokens"] == 1
    assert not out.finite[0, 0]
    assert out.weights[0, 0] == 0
    assert out.denominator == mask.sum() - 1
    assert all(math.isfinite(value) for value in out.metrics.values())


def test_extreme_log_ratios_stay_finite_and_are_counted():
    learner = torch.tensor([[100.0, 88.8, -1000.0, 0.0]])
    out = correct(learner, torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), Correction(veto=None))
    assert out.weights.tolist() == [[2.0, 2.0, pytest.approx(math.exp(-MAX_LOG_RATIO)), 1.0]]
    assert out.metrics["bounded_tokens"] == 3
    assert out.metrics["logratio_abs_max"] == 1000
    assert all(math.isfinite(value) for value in out.metrics.values())


def test_denominator_rule_with_the_band_of_a_known_case():
    # Log ratios and band of a real report: keep = [T, F, F, F, T], so the loss divides by 5 or by 2.
    ell = torch.tensor([[0.1, -1.5, 0.8, -10.0, 0.3]])
    mask = torch.ones(1, 5, dtype=torch.bool)
    band = {"mode": "mask", "lower": 0.5, "upper": 2.0, "veto": None}
    fixed = correct(ell, torch.zeros(1, 5), mask, Correction(**band))
    kept = correct(ell, torch.zeros(1, 5), mask, Correction(**band, denominator="kept"))
    assert fixed.keep.tolist() == [[True, False, False, False, True]]
    assert (fixed.denominator, kept.denominator) == (5, 2)
    assert fixed.metrics["mask_frac"] == pytest.approx(3 / 5)


def test_veto_drops_the_sequence_of_one_far_token():
    ell = torch.zeros(3, 4)
    ell[1, 2] = math.log(0.5e-4)
    out = correct(ell - 1, torch.full((3, 4), -1.0), torch.ones(3, 4, dtype=torch.bool), Correction())
    assert out.keep.all(-1).tolist() == [True, False, True]
    assert out.metrics["veto_seq_frac"] == pytest.approx(1 / 3)


def test_batches_without_tokens_report_counts_only():
    learner, sampler, mask = ragged()
    for shape in (slice(0, 0), slice(None)):
        out = correct(learner[shape], sampler[shape], torch.zeros_like(mask[shape]), Correction())
        assert out.denominator == 1
        assert not out.weights.any()
        assert out.metrics["tokens"] == 0
        assert "sampler_kl_k1" not in out.metrics


def test_weights_carry_no_gradient():
    learner, sampler, mask = ragged()
    assert not correct(learner.requires_grad_(), sampler, mask, Correction()).weights.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(6, 40)}, "mask.bool"),
        ({"sampler": None}, "record it"),
        ({"sampler": torch.zeros(6, 39)}, "align"),
        ({"learner": torch.zeros(6, 40, dtype=torch.long)}, "floating"),
    ],
)
def test_inputs_that_cannot_form_a_ratio_are_refused(change, message):
    inputs = dict(zip(("learner", "sampler", "mask"), ragged(), strict=True)) | change
    with pytest.raises(ConfigError, match=message):
        correct(inputs["learner"], inputs["sampler"], inputs["mask"], Correction())


@pytest.mark.parametrize(
    "fields",
    [
        {"level": "tokens"},
        {"mode": "tis"},
        {"upper": 0.7},
        {"upper": math.nan},
        {"mode": "clip", "lower": 3.0},
        {"mode": "clip", "lower": -0.7},
        {"mode": "truncate", "lower": 0.5},
        {"veto": (None, None)},
        {"veto": (-9.2, None)},
        {"veto": (None, 0.5)},
        {"denominator": "mean"},
    ],
)
def test_contradictory_settings_are_refused(fields):
    with pytest.raises(ConfigError):
        Correction(**fields)


def test_memory_layout_and_device_views_do_not_matter():
    learner, sampler, mask = ragged()
    clean = correct(learner, sampler, mask, Correction())
    wide = [torch.stack([x, x], dim=-1) for x in (learner, sampler, mask)]
    strided = correct(wide[0][..., 0], wide[1][..., 1], wide[2][..., 0], Correction())
    transposed = correct(learner.T.contiguous().T, sampler.T.contiguous().T, mask.T.contiguous().T, Correction())
    for out in (strided, transposed):
        assert torch.equal(out.weights, clean.weights)
        assert out.metrics == pytest.approx(clean.metrics, rel=1e-6)
