"""Every peer's correction by name. The table is data; `tests` hold each entry against the peer's own formula.

A preset reproduces what the peer's code does to the loss of a token (weight, whether it stays, denominator). Where a
peer's code and its own text disagree, the text is followed and `note` names the difference.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ConfigError
from .rules import RejectRule


@dataclass(frozen=True)
class Preset:
    """One named setting of a peer."""

    settings: Mapping[str, Any]
    """Fields of `Correction` that differ from their defaults."""
    source: str
    """The peer's own option names."""
    bypass: bool = False
    """The peer takes the sampler's log-probs as the old policy of the loss: the PPO ratio is then the correction, and
    a loss whose ratio is taken against the learner's own old log-probs needs another preset."""
    note: str = ""
    """Where rlq differs on purpose, and why."""


def _tis(level: str, upper: float, **fields: Any) -> dict[str, Any]:
    return dict(level=level, mode="truncate", upper=upper, veto=None, **fields)


def _is(level: str = "token", **fields: Any) -> dict[str, Any]:
    return _tis(level, math.inf, **fields)


def _none(**fields: Any) -> dict[str, Any]:
    return dict(mode="none", veto=None, **fields)


def _mask(level: str, lower: float | None, upper: float, **fields: Any) -> dict[str, Any]:
    return dict(level=level, mode="mask", lower=lower, upper=upper, veto=None, **fields)


_GEO = (RejectRule("k1", "mean", 0.999, 1.001),)
_K3 = (RejectRule("k3", "mean", upper=0.01),)
_KEPT = "kept"
_VERL_K1 = (
    "verl's code keeps 1/rho in the band, its mathematics page keeps rho in the band; the page is followed. "
    "They agree where lower = 1/upper."
)
_VERL = {
    "decoupled_token_is": (_tis("token", 2.0), "rollout_is=token", ""),
    "decoupled_seq_is": (_tis("sequence", 2.0), "rollout_is=sequence", ""),
    "decoupled_token_icepop": (_mask("token", 0.5, 5.0), "rollout_is=token, threshold 0.5_5.0", ""),
    "decoupled_seq_is_rs": (
        _tis("sequence", 2.0, reject=(RejectRule("k1", "sum", 0.5, 2.0),), denominator=_KEPT),
        "rollout_is=sequence, rollout_rs=seq_sum_k1 0.5_2.0",
        _VERL_K1,
    ),
    "decoupled_geo_rs": (_none(reject=_GEO, denominator=_KEPT), "rollout_rs=seq_mean_k1 0.999_1.001", _VERL_K1),
    "decoupled_geo_rs_seq_tis": (
        _tis("sequence", 2.0, reject=_GEO, denominator=_KEPT),
        "rollout_is=sequence, rollout_rs=seq_mean_k1 0.999_1.001",
        _VERL_K1,
    ),
    "decoupled_geo_rs_token_tis": (
        _tis("token", 2.0, reject=_GEO, denominator=_KEPT),
        "rollout_is=token, rollout_rs=seq_mean_k1 0.999_1.001",
        _VERL_K1,
    ),
    "decoupled_k3_rs": (_none(reject=_K3, denominator=_KEPT), "rollout_rs=seq_mean_k3 0.01", ""),
    "decoupled_k3_rs_seq_tis": (
        _tis("sequence", 2.0, reject=_K3, denominator=_KEPT),
        "rollout_is=sequence, rollout_rs=seq_mean_k3 0.01",
        "",
    ),
    "decoupled_k3_rs_token_tis": (
        _tis("token", 2.0, reject=_K3, denominator=_KEPT),
        "rollout_is=token, rollout_rs=seq_mean_k3 0.01",
        "",
    ),
    "disabled": (_none(), "rollout_is=null, rollout_rs=null", ""),
}
_VERL_BYPASS = {
    "bypass_ppo_clip": ("disabled", "bypass_mode, loss_type=ppo_clip"),
    "bypass_ppo_clip_geo_rs": ("decoupled_geo_rs", "bypass_mode, loss_type=ppo_clip, seq_mean_k1"),
    "bypass_ppo_clip_k3_rs": ("decoupled_k3_rs", "bypass_mode, loss_type=ppo_clip, seq_mean_k3"),
    "bypass_pg_is": ("decoupled_seq_is", "bypass_mode, loss_type=reinforce, rollout_is=sequence"),
    "bypass_pg_token_icepop": ("decoupled_token_icepop", "bypass_mode, loss_type=reinforce, 0.5_5.0"),
    "bypass_pg_geo_rs": ("decoupled_geo_rs", "bypass_mode, loss_type=reinforce, seq_mean_k1"),
    "bypass_pg_geo_rs_seq_tis": ("decoupled_geo_rs_seq_tis", "bypass_mode, loss_type=reinforce, sequence"),
    "bypass_pg_geo_rs_token_tis": ("decoupled_geo_rs_token_tis", "bypass_mode, loss_type=reinforce, token"),
}

_TRL_SUM = "TRL does not bound the log ratio: a sequence beyond exp(+-20) differs, where TRL gives 0 or overflows."
_TRL = {
    "token_truncate": Preset(_tis("token", 3.0), "vllm_importance_sampling_mode=token_truncate, clip_max=3"),
    "token_mask": Preset(_mask("token", None, 3.0), "vllm_importance_sampling_mode=token_mask, clip_max=3"),
    "sequence_truncate": Preset(
        _tis("sequence", 3.0), "vllm_importance_sampling_mode=sequence_truncate, clip_max=3", note=_TRL_SUM
    ),
    "sequence_mask": Preset(
        _mask("sequence", None, 3.0), "vllm_importance_sampling_mode=sequence_mask, clip_max=3 (TRL's default)"
    ),
}

_NEMO = {
    "importance_sampling": Preset(_is(), "use_importance_sampling_correction"),
    "sequence_importance_sampling": Preset(_is("sequence"), "with sequence_level_importance_ratios"),
    "tis": Preset(_tis("token", 5.0), "truncated_importance_sampling_type=tis, ratio 5"),
    "icepop": Preset(_mask("token", 0.5, 5.0), "truncated_importance_sampling_type=icepop, 0.5 to 5"),
    "seq_mask_tis": Preset(
        _is(reject=(RejectRule("ratio", "mean", 0.999, 1.002),)),
        "truncated_importance_sampling_type=seq-mask-tis, 0.999 to 1.002",
        note="kept sequences carry the raw token ratio, as the code has it",
    ),
    "seq_logprob_error": Preset(
        _none(reject=(RejectRule("abs", "mean", upper=2.0),)), "grpo.seq_logprob_error_threshold=2"
    ),
}

_SLIME_NORM = "slime normalizes over what one call sees; rlq over the whole batch, across ranks"
_SLIME = {
    "tis": Preset(dict(mode="clip", lower=0.0, upper=2.0, veto=None), "--use-tis, --tis-clip 2"),
    "icepop": Preset(_mask("token", 0.0, 2.0), "icepop_function, --tis-clip 2"),
    "mis": Preset(
        dict(upper=2.0, reject=(RejectRule("ratio", "token", 0.5, 2.0),), normalize="batch"),
        "mis.yaml: token truncate 2.0, token rejection 0.5 to 2.0, veto 1e-4, batch normalization",
        note=_SLIME_NORM,
    ),
    "mis_token_clip": Preset(dict(mode="clip", lower=0.5, upper=2.0, veto=None), "tis_mode=clip"),
    "mis_sequence_truncate": Preset(_tis("sequence", 2.0), "tis_level=sequence, tis_mode=truncate"),
    "mis_sequence_mask": Preset(_mask("sequence", 0.5, 2.0), "tis_level=sequence, tis_mode=mask"),
    "mis_geometric_mask": Preset(_mask("geometric", 0.9999, 1.0001), "tis_level=geometric, tis_mode=mask"),
    "mis_geometric_truncate": Preset(_tis("geometric", 1.0001), "tis_level=geometric, tis_mode=truncate"),
}

_SKYRL = {
    "token_tis": Preset(_tis("token", 2.0), "tis_ratio_type=token"),
    "sequence_tis": Preset(_tis("sequence", 5.0), "tis_ratio_type=sequence"),
    "product_mask": Preset(_none(reject=(RejectRule("ratio", "sum", 0.5, 2.0),)), "sequence_mask_metric=product"),
    "geometric_mask": Preset(
        _none(reject=(RejectRule("ratio", "mean", 0.99, 1.01),)), "sequence_mask_metric=geometric"
    ),
    "token_tis_outlier": Preset(
        dict(upper=2.0, veto=(1e-4, 100.0)), "tis_ratio_type=token, outlier_token_is_threshold 1e-4 and 100"
    ),
}

_AREAL = {
    "token_clamp": Preset(_tis("token", 5.0), "level=token, action=clamp, metric=ratio, upper 5"),
    "token_mask": Preset(_mask("token", None, 5.0), "level=token, action=mask, metric=ratio, upper 5"),
    "sequence_clamp": Preset(_tis("geometric", 5.0), "level=sequence, action=clamp, metric=ratio, agg=mean, upper 5"),
    "sequence_mask": Preset(_mask("geometric", None, 5.0), "level=sequence, action=mask, metric=ratio, agg=mean"),
    "sequence_mask_sum": Preset(
        _is("geometric", reject=(RejectRule("ratio", "sum", upper=5.0),)),
        "level=sequence, action=mask, metric=ratio, agg=sum: filter by the product, weight by the geometric mean",
    ),
    "sequence_mask_max": Preset(
        _is("geometric", reject=(RejectRule("ratio", "max", upper=5.0),)),
        "level=sequence, action=mask, metric=ratio, agg=max",
    ),
}
_AREAL_NOTE = "AReaL gives a non-finite token weight 1; rlq drops and counts it"

_DPPO = (
    RejectRule("prob_diff", "token", upper=0.2, advantage="positive"),
    RejectRule("prob_diff", "token", lower=-0.2, advantage="nonpositive"),
)
_PRIME = {
    "dppo": Preset(
        _is(reject=_DPPO),
        "dppo_mask_high=0.2, dppo_mask_low=0.2",
        bypass=True,
        note="the weight and mask of the policy term; the penalty kl_tau * ell^2 belongs to the loss",
    ),
    "ipo": Preset(_is(reject=(RejectRule("prob_diff", "token", -0.1, 0.1),)), "ipo_threshold=0.1", bypass=True),
}

_ROLL = {
    **{
        level: Preset(_tis(level, 1.2), f"is_weight.weight_type={level}, upper_bound 1.2")
        for level in ("token", "sequence", "geometric", "segment")
    },
    "token_filter": Preset(
        _none(reject=(RejectRule("ratio", "token", 0.8, 1.2),), denominator=_KEPT), "filters: token ratio 0.8 to 1.2"
    ),
    "geometric_filter": Preset(
        _none(reject=(RejectRule("ratio", "mean", 0.8, 1.2),), denominator=_KEPT), "filters: geometric ratio 0.8 to 1.2"
    ),
    "token_diff_filter": Preset(
        _none(reject=(RejectRule("prob_diff", "token", -0.2, 0.2),), denominator=_KEPT), "filters: diff -0.2 to 0.2"
    ),
}

_OPENRLHF = {
    "tis": Preset(dict(mode="clip", lower=0.5, upper=5.0, veto=None), "is_correction_type=tis, 0.5 to 5"),
    "icepop": Preset(_mask("token", 0.5, 5.0), "is_correction_type=icepop, 0.5 to 5"),
    "seq_mask_tis": Preset(
        dict(mode="clip", lower=0.5, upper=5.0, veto=None, reject=(RejectRule("ratio", "mean", 0.5, 5.0),)),
        "is_correction_type=seq-mask-tis, 0.5 to 5",
        note="the help text clamps the weights of kept sequences, the code leaves them raw; the text is followed",
    ),
}

_MS_SWIFT = {
    "token_truncate": Preset(_tis("token", 2.0), "rollout_importance_sampling_mode=token_truncate"),
    "token_mask": Preset(_mask("token", None, 2.0), "rollout_importance_sampling_mode=token_mask"),
    "sequence_truncate": Preset(_tis("geometric", 2.0), "rollout_importance_sampling_mode=sequence_truncate"),
    "sequence_mask": Preset(
        _is(reject=(RejectRule("ratio", "mean", upper=2.0),)),
        "rollout_importance_sampling_mode=sequence_mask: filter by the geometric mean, raw token weights",
    ),
}

CORRECTIONS: dict[str, Preset] = {
    **{f"verl/{name}": Preset(c, source, note=note) for name, (c, source, note) in _VERL.items()},
    **{
        f"verl/{name}": Preset(_VERL[base][0], source, bypass=True, note=_VERL[base][2])
        for name, (base, source) in _VERL_BYPASS.items()
    },
    **{f"trl/{name}": p for name, p in _TRL.items()},
    **{f"nemo/{name}": p for name, p in _NEMO.items()},
    **{f"slime/{name}": p for name, p in _SLIME.items()},
    **{f"miles/{name}": p for name, p in _SLIME.items()},
    **{f"skyrl/{name}": p for name, p in _SKYRL.items()},
    **{f"areal/{name}": replace(p, note=_AREAL_NOTE) for name, p in _AREAL.items()},
    **{f"prime-rl/{name}": p for name, p in _PRIME.items()},
    **{f"roll/{name}": p for name, p in _ROLL.items()},
    **{f"openrlhf/{name}": p for name, p in _OPENRLHF.items()},
    **{f"ms-swift/{name}": p for name, p in _MS_SWIFT.items()},
    "flashrl/tis": Preset(_tis("token", 2.0), "verl token TIS, C=2"),
    "rlq/default": Preset(dict(), "token truncation at 2.0 and a veto at 1e-4"),
    "rlq/is": Preset(_is(), "plain token importance weights"),
    "rlq/sequence_is": Preset(_is("sequence"), "plain sequence importance weights"),
    "rlq/none": Preset(_none(), "measure only"),
    "deepseek/off_policy_sequence_mask": Preset(
        _none(reject=(RejectRule("ratio", "mean", lower=math.exp(-0.5), advantage="nonpositive"),)),
        "DeepSeek-V3.2 eq. 9; TRL's off_policy_mask_threshold=0.5: drop a sequence with mean ell < -0.5 and A <= 0",
        note="stated for the current policy against the sampler: pass the learner's current log-probs",
    ),
}
"""Name to preset."""


def find(name: str) -> Preset:
    """The preset of a name.

    Raises:
        ConfigError: unknown name; the message lists close ones.
    """
    key = name.replace("seq-mask-tis", "seq_mask_tis")
    if key not in CORRECTIONS:
        close = difflib.get_close_matches(key, CORRECTIONS, n=3, cutoff=0.3)
        raise ConfigError(f"no correction preset {name!r}: did you mean {', '.join(close) or ', '.join(CORRECTIONS)}?")
    return CORRECTIONS[key]
