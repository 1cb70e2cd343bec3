"""Breakdown tables, worst tokens, bias audit, shadow estimators and gap attribution."""

import itertools
import math

import numpy as np
import pytest
import torch

from rlq.bridge import (
    Correction,
    RejectRule,
    bias_audit,
    breakdown,
    correct,
    gap_attribution,
    log_ratio_histogram,
    shadow,
    shadow_metrics,
    worst_tokens,
)
from rlq.errors import ConfigError


def batch(rows=12, length=30, scale=0.4, seed=0):
    g = torch.Generator().manual_seed(seed)
    sampler = -2 * torch.rand(rows, length, generator=g, dtype=torch.float64) - 0.1
    learner = (sampler + scale * torch.randn(rows, length, generator=g, dtype=torch.float64)).clamp(max=0)
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=g)
    return learner, sampler, mask


def test_every_table_adds_up_to_the_batch():
    learner, sampler, mask = batch()
    out = correct(learner, sampler, mask, Correction(mode="mask", lower=0.7, upper=1.4))
    tables = breakdown(out, sampler, entropy=-sampler, advantages=torch.randn(len(mask)))
    assert set(tables) == {"position", "sampler_prob", "entropy", "advantage_sign", "length"}
    for table in tables.values():
        rows = table.rows()
        tokens = np.array([r["tokens"] for r in rows])
        assert tokens.sum() == mask.sum()
        for name in ("sampler_kl_k1", "sampler_kl_k3", "logratio_abs_mean", "ratio_mean", "weight_mean"):
            mean = (tokens * [r[name] for r in rows]).sum() / tokens.sum()
            assert mean == pytest.approx(out.metrics[name], rel=1e-6), (table.axis, name)
        dropped = (tokens * [r["dropped_frac"] for r in rows]).sum() / tokens.sum()
        assert dropped == pytest.approx(1 - out.metrics["kept_token_frac"])


def test_tables_put_tokens_in_the_right_bin_and_merge():
    sampler = torch.tensor([[-0.001, -3.0, -9.0]])
    out = correct(sampler + torch.tensor([[0.0, 0.1, -0.2]]), sampler, torch.ones(1, 3, dtype=torch.bool), Correction())
    tables = breakdown(out, sampler, advantages=torch.tensor([-2.0]))
    position = {r["bin"]: r["logratio_abs_mean"] for r in tables["position"].rows()}
    assert position == pytest.approx({"< 1": 0.0, "1 to 2": 0.1, "2 to 4": 0.2}, abs=1e-6)
    assert [r["bin"] for r in tables["sampler_prob"].rows()] == ["< 0.001", "0.01 to 0.1", ">= 0.999"]
    assert [r["bin"] for r in tables["advantage_sign"].rows()] == ["< -0.5"]
    assert [r["bin"] for r in tables["length"].rows()] == ["2 to 4"]
    doubled = tables["length"].merge(tables["length"]).rows()
    assert doubled[0]["tokens"] == 6
    assert doubled[0]["sampler_kl_k3"] == tables["length"].rows()[0]["sampler_kl_k3"]
    with pytest.raises(ConfigError, match="entropy"):
        breakdown(out, sampler, entropy=torch.zeros(1, 2))


def test_position_counts_completion_tokens_whatever_the_padding_side():
    learner, sampler, mask = batch()
    right = breakdown(correct(learner, sampler, mask, Correction()), sampler)
    shift = [learner.shape[1] - int(n) for n in mask.sum(-1)]
    learner, sampler, mask = (
        torch.stack([row.roll(s) for row, s in zip(x, shift, strict=True)]) for x in (learner, sampler, mask)
    )
    left = breakdown(correct(learner, sampler, mask, Correction()), sampler)
    assert torch.allclose(left["position"].sums, right["position"].sums, rtol=1e-12)


def test_histogram_holds_every_token_and_is_centered():
    learner, sampler, mask = batch(scale=0.05)
    sums = correct(learner, sampler, mask, Correction()).sums
    counts, edges = log_ratio_histogram(sums, bins=32)
    ell = (learner - sampler)[mask].numpy()
    assert (len(counts), len(edges), sum(counts)) == (32, 33, mask.sum())
    assert edges[0] == -edges[-1]
    assert abs(ell).max() <= edges[-1] <= abs(ell).max() * (1 + 1 / 32)
    empty = correct(learner, sampler, torch.zeros_like(mask), Correction()).sums
    assert sum(log_ratio_histogram(empty)[0]) == 0


def test_worst_tokens_come_in_order_with_their_context():
    learner, sampler, mask = batch()
    ids = torch.arange(mask.numel()).view_as(mask)
    out = correct(learner, sampler, mask, Correction())
    worst = worst_tokens(out, learner, sampler, ids, count=5, context=3)
    sizes = [abs(w.log_ratio) for w in worst]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(out.metrics["logratio_abs_max"])
    for w in worst:
        assert w.token == ids[w.sequence, w.position]
        assert w.context == tuple(range(w.token - min(3, w.position), w.token))
        assert w.log_ratio == pytest.approx(w.learner_logprob - w.sampler_logprob)
    assert len(worst_tokens(out, learner, sampler, ids, count=10**6)) == mask.sum()


def test_bias_audit_of_a_case_by_hand():
    # Two groups of two. The veto drops completion 1 (reward 1), so group 0 keeps reward 0 where its mean is 0.5.
    ell = torch.zeros(4, 4)
    ell[1, 0] = -12.0
    mask = torch.arange(4) < torch.tensor([[4], [2], [4], [4]])
    out = correct(ell - 1, torch.full((4, 4), -1.0), mask, Correction())
    audit = bias_audit(
        out,
        torch.tensor([0.0, 1.0, 1.0, 0.0]),
        advantages=torch.tensor([-1.0, 1.0, 1.0, -1.0]),
        groups=torch.tensor([0, 0, 5, 5]),
    )
    assert (audit.kept_seqs, audit.dropped_seqs) == (3, 1)
    assert audit.reward_kept == pytest.approx(1 / 3)
    assert audit.reward_dropped == 1
    assert (audit.length_kept, audit.length_dropped) == (4, 2)
    assert audit.advantage_kept == pytest.approx(-1 / 3)
    assert audit.baseline_shift == pytest.approx((0.5 + 0.0) / 2)
    assert (audit.groups_lost_frac, audit.group_kept_mean) == (0, pytest.approx(0.75))
    assert bias_audit(out, torch.zeros(4)).metrics().keys() == {
        f"audit/{n}"
        for n in ("kept_seqs", "dropped_seqs", "reward_kept", "reward_dropped", "length_kept", "length_dropped")
    }
    with pytest.raises(ConfigError, match="rewards"):
        bias_audit(out, torch.zeros(3))


def test_shadow_of_the_active_correction_is_parallel_to_it():
    learner, sampler, mask = batch()
    active = Correction(upper=1.5)
    names = {"same": active, "scaled": Correction(upper=1.5, denominator="kept"), "none": Correction(mode="none")}
    result = shadow(learner, sampler, mask, names, active=active, advantages=torch.randn(len(mask)))
    assert result["same"].cosine == pytest.approx(1, abs=1e-12)
    assert result["same"].norm_ratio == pytest.approx(1)
    assert result["scaled"].cosine == pytest.approx(1, abs=1e-12)
    assert result["none"].weight_mean == 1
    assert result["none"].cosine < 1
    assert shadow_metrics(result)["shadow/none/ess"] == 1


def test_shadow_cosine_is_that_of_gradients_by_autograd():
    learner, sampler, mask = batch(rows=5, length=8)
    torch.manual_seed(1)
    hidden = torch.randn(5, 8, 3, dtype=torch.float64)
    weight = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(5, dtype=torch.float64)
    rejecting = Correction(mode="mask", lower=0.8, upper=1.3)
    grads = []
    for correction in (Correction(), rejecting):
        out = correct(learner, sampler, mask, correction)
        logprob = hidden @ weight  # its gradient with respect to weight is hidden: the features
        loss = (out.weights * advantages[:, None] * logprob).sum() / out.denominator
        grads.append(torch.autograd.grad(loss, weight)[0])
    expected = torch.cosine_similarity(*grads, dim=0)
    arguments = learner, sampler, mask, {"m": rejecting}
    for result in (
        shadow(*arguments, active=Correction(), advantages=advantages, features=hidden),
        shadow(
            *arguments,
            active=Correction(),
            advantages=advantages,
            gradient=lambda c: (c[..., None] * hidden).sum((0, 1)),
        ),
    ):
        assert result["m"].cosine == pytest.approx(expected.item(), rel=1e-9)
        assert result["m"].norm_ratio == pytest.approx((grads[1].norm() / grads[0].norm()).item(), rel=1e-9)


def gap_scores(seed=0):
    learner, sampler, mask = batch(seed=seed)
    g = torch.Generator().manual_seed(seed + 1)
    old = learner + 0.1 * torch.randn(learner.shape, generator=g, dtype=torch.float64)
    quantized = old + 0.3 * torch.randn(learner.shape, generator=g, dtype=torch.float64)
    return learner, old, quantized, sampler, mask


def test_gap_parts_sum_to_the_whole():
    now, old, quantized, sampler, mask = gap_scores()
    gap = gap_attribution(now, old, quantized, sampler, mask)
    whole = correct(now, sampler, mask, Correction()).metrics
    assert gap.log_ratio_total == pytest.approx(-whole["sampler_kl_k1"], rel=1e-12)
    assert gap.k3_total == pytest.approx(whole["sampler_kl_k3"], rel=1e-12)
    assert set(gap.metrics()) == {f"gap/{p}{s}" for p in ("stale", "quant", "engine") for s in ("", "_logratio")}


def test_gap_with_one_cause_blames_it_alone():
    now, _, _, sampler, mask = gap_scores()
    whole = correct(now, sampler, mask, Correction()).metrics["sampler_kl_k3"]
    for part, scores in {
        "stale": (now, sampler, sampler, sampler),
        "quant": (now, now, sampler, sampler),
        "engine": (now, now, now, sampler),
    }.items():
        gap = gap_attribution(*scores, mask)
        assert gap.k3[part] == pytest.approx(whole, rel=1e-12)
        assert all(value == 0 for other, value in gap.k3.items() if other != part)


def test_gap_of_k3_is_the_mean_over_closing_orders():
    now, old, quantized, sampler, mask = gap_scores()
    gaps = {"stale": now - old, "quant": old - quantized, "engine": quantized - sampler}
    parts = dict.fromkeys(gaps, 0.0)
    for order in itertools.permutations(gaps):
        s = torch.zeros_like(now)
        for part in order:
            before = (s.exp() - 1 - s)[mask].mean().item()
            s = s + gaps[part]
            parts[part] += ((s.exp() - 1 - s)[mask].mean().item() - before) / 6
    assert gap_attribution(now, old, quantized, sampler, mask).k3 == pytest.approx(parts, rel=1e-9)


def test_gap_ignores_tokens_that_cannot_be_scored():
    now, old, quantized, sampler, mask = gap_scores()
    clean = gap_attribution(now[:, 1:], old[:, 1:], quantized[:, 1:], sampler[:, 1:], mask[:, 1:])
    quantized[:, 0] = math.nan
    assert gap_attribution(now, old, quantized, sampler, mask) == clean
    nothing = gap_attribution(now, old, quantized, sampler, torch.zeros_like(mask))
    assert nothing.metrics() == {}


def test_rejecting_bad_completions_shows_in_the_audit():
    # Wrong completions sit further from the sampler: a geometric band then drops them and raises the kept reward.
    g = torch.Generator().manual_seed(0)
    reward = (torch.rand(400, generator=g) < 0.5).double()
    ell = torch.where(reward > 0, 0.01, 0.05)[:, None] * torch.randn(400, 20, generator=g)
    rule = RejectRule("ratio", "mean", 0.995, 1.005)
    out = correct(ell - 1, ell * 0 - 1, torch.ones(400, 20, dtype=torch.bool), Correction(mode="none", reject=[rule]))
    audit = bias_audit(out, reward)
    metrics = audit.metrics()
    assert metrics["audit/reward_kept"] > 0.6 > 0.5 > metrics["audit/reward_dropped"]
