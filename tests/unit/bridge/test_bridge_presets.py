"""Every preset against the formula of the system it is named after, written again here in float64 numpy.

The references share no code with rlq.bridge. Inputs: 1,000 random ragged batches, extreme ones included, as one stack
of rows (no preset but the batch-normalized one looks across rows; that one is run batch by batch).
"""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from rlq.bridge import CORRECTIONS, Correction, correct
from rlq.errors import ConfigError

LENGTH = 24


def random_batch(rng):
    rows, width = rng.integers(1, 6), rng.integers(1, LENGTH + 1)
    scale = rng.choice([1e-4, 1e-2, 0.1, 0.5, 2.0, 30.0])
    sampler = -rng.exponential(1.0, (rows, LENGTH)) - 1e-3
    learner = np.minimum(sampler + scale * rng.standard_normal((rows, LENGTH)), 0.0)
    position = np.arange(LENGTH)
    lengths = rng.integers(0, width + 1, (rows, 1))
    mask = position < lengths if rng.random() < 0.7 else position >= LENGTH - lengths  # padding right or left
    holes = rng.random((rows, LENGTH)) < 0.1  # tool output inside a completion: several segments
    mask = mask & ~holes
    learner[rng.random((rows, LENGTH)) < 0.002] = -1000.0
    sampler[~mask] = rng.choice([np.nan, -np.inf, 0.0, 50.0])
    return learner, sampler, mask, rng.standard_normal(rows)


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(7)
    return [random_batch(rng) for _ in range(1000)]


@pytest.fixture(scope="module")
def stacked(batches):
    return [np.concatenate(parts) for parts in zip(*batches, strict=True)]


def token(ell, mask):
    return np.exp(np.clip(ell, -20, 20))


def over_rows(ell, mask, mean):
    total = np.where(mask, ell, 0).sum(1, keepdims=True)
    log = total / np.maximum(mask.sum(1, keepdims=True), 1) if mean else total
    return np.broadcast_to(np.exp(np.clip(log, -20, 20)), ell.shape)


def product(ell, mask):
    return over_rows(ell, mask, mean=False)


def geometric(ell, mask):
    return over_rows(ell, mask, mean=True)


def segment(ell, mask):
    out = np.ones_like(ell)
    for i, row in enumerate(mask):
        j = 0
        while j < len(row):
            end = j
            while end < len(row) and row[end]:
                end += 1
            if end > j:
                out[i, j:end] = np.exp(np.clip(ell[i, j:end].mean(), -20, 20))
            j = end + 1
    return out


def mean_of(per_token, mask):
    return np.where(mask, per_token, 0).sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1)


def k3(ell):
    return np.expm1(np.clip(ell, -20, 20)) - ell


def inside(x, low, high):
    return (x >= low) & (x <= high)


def tis(ratio, cap):
    return lambda e, m, **_: (np.minimum(ratio(e, m), cap), True)


def band(ratio, low, high):
    return lambda e, m, **_: ((w := ratio(e, m)) * inside(w, low, high), inside(w, low, high))


def filtered(weight, keep):
    return lambda e, m, **k: (weight(e, m), keep(e, m, **k))


def one(e, m):
    return np.ones_like(e)


def geo_band(low, high):
    return lambda e, m, **_: inside(geometric(e, m), low, high)


def k3_below(u):
    return lambda e, m, **_: mean_of(k3(e), m) <= u


def no_far_token(e, m, **_):
    return ~(m & (e < np.log(1e-4))).any(1, keepdims=True)


def outlier(e, m, **_):
    far = m & ((e < np.log(1e-4)) | (e > np.log(100)))
    return ~far.any(1, keepdims=True)


def row_max(ell, mask):
    return np.exp(np.where(mask, ell, -np.inf).max(1, keepdims=True))


def dppo(e, m, p, q, a):
    a = a[:, None]
    return ~(((a > 0) & (p - q > 0.2)) | ((a <= 0) & (p - q < -0.2)))


def deepseek(e, m, a, **_):
    return ~((a[:, None] <= 0) & (mean_of(e, m) < -0.5))


def clamp2(low, high):
    return lambda e, m: np.clip(token(e, m), low, high)


def capped(ratio, cap):
    return lambda e, m: np.minimum(ratio(e, m), cap)


GEO = geo_band(0.999, 1.001)
K3 = k3_below(0.01)
VERL = {
    "decoupled_token_is": tis(token, 2.0),
    "decoupled_seq_is": tis(product, 2.0),
    "decoupled_token_icepop": band(token, 0.5, 5.0),
    "decoupled_seq_is_rs": filtered(capped(product, 2.0), lambda e, m, **_: inside(product(e, m), 0.5, 2.0)),
    "decoupled_geo_rs": filtered(one, GEO),
    "decoupled_geo_rs_seq_tis": filtered(capped(product, 2.0), GEO),
    "decoupled_geo_rs_token_tis": filtered(capped(token, 2.0), GEO),
    "decoupled_k3_rs": filtered(one, K3),
    "decoupled_k3_rs_seq_tis": filtered(capped(product, 2.0), K3),
    "decoupled_k3_rs_token_tis": filtered(capped(token, 2.0), K3),
    "disabled": tis(one, 9.0),
    "bypass_ppo_clip": tis(one, 9.0),
    "bypass_ppo_clip_geo_rs": filtered(one, GEO),
    "bypass_ppo_clip_k3_rs": filtered(one, K3),
    "bypass_pg_is": tis(product, 2.0),
    "bypass_pg_token_icepop": band(token, 0.5, 5.0),
    "bypass_pg_geo_rs": filtered(one, GEO),
    "bypass_pg_geo_rs_seq_tis": filtered(capped(product, 2.0), GEO),
    "bypass_pg_geo_rs_token_tis": filtered(capped(token, 2.0), GEO),
}
SLIME = {
    "tis": tis(token, 2.0),
    "icepop": band(token, 0.0, 2.0),
    "mis_token_clip": filtered(clamp2(0.5, 2.0), lambda e, m, **_: True),
    "mis_sequence_truncate": tis(product, 2.0),
    "mis_sequence_mask": band(product, 0.5, 2.0),
    "mis_geometric_mask": band(geometric, 0.9999, 1.0001),
    "mis_geometric_truncate": tis(geometric, 1.0001),
}
REFERENCES = {
    **{f"verl/{k}": v for k, v in VERL.items()},
    **{f"{peer}/{k}": v for peer in ("slime", "miles") for k, v in SLIME.items()},
    "trl/token_truncate": tis(token, 3.0),
    "trl/token_mask": band(token, 0.0, 3.0),
    "trl/sequence_truncate": tis(product, 3.0),
    "trl/sequence_mask": band(product, 0.0, 3.0),
    "nemo/importance_sampling": tis(token, np.inf),
    "nemo/sequence_importance_sampling": tis(product, np.inf),
    "nemo/tis": tis(token, 5.0),
    "nemo/icepop": band(token, 0.5, 5.0),
    "nemo/seq_mask_tis": filtered(token, geo_band(0.999, 1.002)),
    "nemo/seq_logprob_error": filtered(one, lambda e, m, **_: mean_of(np.exp(np.clip(abs(e), 0, 20)), m) <= 2.0),
    "skyrl/token_tis": tis(token, 2.0),
    "skyrl/sequence_tis": tis(product, 5.0),
    "skyrl/product_mask": filtered(one, lambda e, m, **_: inside(product(e, m), 0.5, 2.0)),
    "skyrl/geometric_mask": filtered(one, geo_band(0.99, 1.01)),
    "skyrl/token_tis_outlier": filtered(capped(token, 2.0), outlier),
    "areal/token_clamp": tis(token, 5.0),
    "areal/token_mask": band(token, 0.0, 5.0),
    "areal/sequence_clamp": tis(geometric, 5.0),
    "areal/sequence_mask": band(geometric, 0.0, 5.0),
    "areal/sequence_mask_sum": filtered(geometric, lambda e, m, **_: product(e, m) <= 5.0),
    "areal/sequence_mask_max": filtered(geometric, lambda e, m, **_: row_max(e, m) <= 5.0),
    "prime-rl/dppo": filtered(token, lambda e, m, p, q, a: dppo(e, m, p, q, a)),
    "prime-rl/ipo": filtered(token, lambda e, m, p, q, **_: abs(p - q) <= 0.1),
    "roll/token": tis(token, 1.2),
    "roll/segment": tis(segment, 1.2),
    "roll/geometric": tis(geometric, 1.2),
    "roll/sequence": tis(product, 1.2),
    "roll/token_filter": filtered(one, lambda e, m, **_: inside(token(e, m), 0.8, 1.2)),
    "roll/geometric_filter": filtered(one, geo_band(0.8, 1.2)),
    "roll/token_diff_filter": filtered(one, lambda e, m, p, q, **_: inside(p - q, -0.2, 0.2)),
    "openrlhf/tis": filtered(clamp2(0.5, 5.0), lambda e, m, **_: True),
    "openrlhf/icepop": band(token, 0.5, 5.0),
    "openrlhf/seq_mask_tis": filtered(clamp2(0.5, 5.0), geo_band(0.5, 5.0)),
    "ms-swift/token_truncate": tis(token, 2.0),
    "ms-swift/token_mask": band(token, 0.0, 2.0),
    "ms-swift/sequence_truncate": tis(geometric, 2.0),
    "ms-swift/sequence_mask": filtered(token, geo_band(0.0, 2.0)),
    "flashrl/tis": tis(token, 2.0),
    "rlq/default": filtered(capped(token, 2.0), no_far_token),
    "rlq/is": tis(token, np.inf),
    "rlq/sequence_is": tis(product, np.inf),
    "rlq/none": tis(one, 9.0),
    "deepseek/off_policy_sequence_mask": filtered(one, deepseek),
}
KEPT_DENOMINATOR = {n for n in REFERENCES if "_rs" in n or n.endswith("_filter")}
BATCHWISE = {"slime/mis", "miles/mis"}  # one object under two names


def reference(name, learner, sampler, mask, advantages):
    """Weights and kept tokens in float64; everything outside the mask is neutral."""
    learner, sampler = (np.where(mask, x, -1.0).astype(np.float64) for x in (learner, sampler))
    extra = {"p": np.exp(learner), "q": np.exp(sampler), "a": advantages}
    weights, keep = REFERENCES[name](np.where(mask, learner - sampler, 0.0), mask, **extra)
    keep = np.broadcast_to(keep, mask.shape) & mask
    return np.where(keep, weights, 0.0), keep


def test_every_preset_has_a_reference():
    assert set(CORRECTIONS) == set(REFERENCES) | BATCHWISE


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", REFERENCES)
def test_preset_equals_its_peers_formula(name, dtype, stacked):
    learner, sampler, mask, advantages = stacked
    learner, sampler = (torch.from_numpy(x).to(dtype) for x in (learner, sampler))
    correction = Correction.preset(name)
    out = correct(learner, sampler, torch.from_numpy(mask), correction, advantages=torch.from_numpy(advantages))
    weights, keep = reference(name, learner.double().numpy(), sampler.double().numpy(), mask, advantages)
    assert np.array_equal(out.keep.numpy(), keep)
    np.testing.assert_allclose(out.weights.double().numpy(), weights, rtol=1e-12 if dtype is torch.float64 else 1e-5)
    assert not out.weights.requires_grad
    assert out.denominator == (keep if name in KEPT_DENOMINATOR else mask).sum()


def test_batch_normalized_preset_equals_its_peers_formula(batches):
    correction = Correction.preset("slime/mis")
    assert Correction.preset("miles/mis") == correction
    for learner, sampler, mask, _ in batches:
        out = correct(torch.from_numpy(learner), torch.from_numpy(sampler), torch.from_numpy(mask), correction)
        ell = np.where(mask, np.where(mask, learner, 0) - np.where(mask, sampler, 0), 0.0)
        w = np.minimum(token(ell, mask), 2.0)
        mean = w[mask].mean() if mask.any() else 1.0
        keep = mask & inside(token(ell, mask), 0.5, 2.0) & no_far_token(ell, mask)
        assert np.array_equal(out.keep.numpy(), keep)
        np.testing.assert_allclose(out.weights.numpy(), np.where(keep, w / mean, 0.0), rtol=1e-12)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_preset_that_needs_advantages_says_so_before_anything_is_computed(name, stacked):
    learner, sampler, mask, _ = (torch.from_numpy(x) for x in stacked)
    correction = Correction.preset(name)
    assert correction.needs_advantages == (name in {"prime-rl/dppo", "deepseek/off_policy_sequence_mask"})
    if correction.needs_advantages:
        with pytest.raises(ConfigError, match="pass advantages to correct"):
            correct(learner, sampler, mask, correction)
    else:
        assert correct(learner, sampler, mask, correction).metrics["tokens"] == mask.sum()


def test_unknown_preset_lists_close_names():
    with pytest.raises(ConfigError, match="verl/decoupled_token_is"):
        Correction.preset("verl/decoupled_tokn_is")
    with pytest.raises(ConfigError, match="cap"):
        Correction.preset("verl/decoupled_token_is", cap=3.0)
    assert Correction.preset("trl/token_truncate", upper=8.0).upper == 8.0


def test_documentation_has_every_preset_and_every_picture():
    docs = Path(__file__).resolve().parents[3] / "docs"
    page = (docs / "corrections.md").read_text()
    draw = runpy.run_path(str(docs / "corrections" / "draw.py"))
    assert page == draw["with_presets"](page), "run python docs/corrections/draw.py"
    assert all(f"| `{name}` |" in page for name in CORRECTIONS if not name.startswith("miles/"))
    pictures = set(re.findall(r"\(corrections/(\w+)\.png\)", page))
    assert pictures == {path.stem for path in (docs / "corrections").glob("*.png")} == set(draw["PICTURES"])
