"""Selection bias: how the tokens that a correction keeps differ from those that were sampled.

Rejection by likelihood is not random: long, surprising or wrong completions are rejected more often, and a group
baseline that was centered over all completions is not centered over the kept ones.

Axes: B sequences, T completion tokens (padded).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigError
from ..correct import BridgeOutput


@dataclass(frozen=True)
class BiasAudit:
    """Kept against dropped. A sequence counts as kept by the share of its tokens that stayed, dropped by the rest."""

    kept_seqs: float
    """Sum of the kept shares."""
    dropped_seqs: float
    """Sum of the dropped shares."""
    reward_kept: float | None
    """Mean reward of what was kept; None if nothing was."""
    reward_dropped: float | None
    """Mean reward of what was dropped; None if nothing was."""
    length_kept: float | None
    """Mean completion length of what was kept."""
    length_dropped: float | None
    """Mean completion length of what was dropped."""
    advantage_kept: float | None
    """Mean advantage of what was kept; its distance from the batch's own mean is bias put into the gradient."""
    advantage_dropped: float | None
    """Mean advantage of what was dropped."""
    baseline_shift: float | None
    """Mean over groups of abs(mean reward of the kept - mean reward of all): how far GRPO's baseline would move if it
    were taken over what is trained on. None without groups."""
    groups_lost_frac: float | None
    """Share of groups of which nothing was kept. None without groups."""
    group_kept_mean: float | None
    """Mean over groups of the kept share of a group. None without groups."""

    def metrics(self) -> dict[str, float]:
        """`audit/...` names to values, without those that are undefined."""
        values = {f"audit/{name}": value for name, value in vars(self).items()}
        return {name: value for name, value in values.items() if value is not None}


@torch.no_grad()
def bias_audit(
    output: BridgeOutput, rewards: Tensor, *, advantages: Tensor | None = None, groups: Tensor | None = None
) -> BiasAudit:
    """Compare what the correction kept with what it dropped.

    Args:
        output: what `correct` returned for the batch.
        rewards: (B,), one reward per completion.
        advantages: (B,), one advantage per completion.
        groups: (B,) integer, the prompt each completion answers.

    Raises:
        ConfigError: an argument is not one value per completion.
    """
    for name, tensor in (("rewards", rewards), ("advantages", advantages), ("groups", groups)):
        if tensor is not None and tensor.shape != output.keep.shape[:1]:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}: pass one per completion, ({len(output.keep)},)")
    lengths = output.finite.sum(-1).double()
    present = lengths > 0
    kept = output.keep.sum(-1).double() / lengths.clamp(min=1)
    dropped = torch.where(present, 1 - kept, 0.0)
    reward = rewards.double()
    advantage = None if advantages is None else advantages.double()
    shift, lost, share = _groups(reward, kept, present, groups)
    return BiasAudit(
        kept_seqs=float(kept.sum()),
        dropped_seqs=float(dropped.sum()),
        reward_kept=_mean(reward, kept),
        reward_dropped=_mean(reward, dropped),
        length_kept=_mean(lengths, kept),
        length_dropped=_mean(lengths, dropped),
        advantage_kept=None if advantage is None else _mean(advantage, kept),
        advantage_dropped=None if advantage is None else _mean(advantage, dropped),
        baseline_shift=shift,
        groups_lost_frac=lost,
        group_kept_mean=share,
    )


def _mean(values: Tensor, share: Tensor) -> float | None:
    total = float(share.sum())
    return float((values * share).sum()) / total if total > 0 else None


def _groups(
    reward: Tensor, kept: Tensor, present: Tensor, groups: Tensor | None
) -> tuple[float | None, float | None, float | None]:
    if groups is None or not bool(present.any()):
        return None, None, None
    _, index = torch.unique(groups[present], return_inverse=True)
    reward, kept = reward[present], kept[present]
    columns = torch.stack([torch.ones_like(kept), reward, kept, reward * kept], dim=1)
    sums = columns.new_zeros((int(index.max()) + 1, 4)).index_add_(0, index, columns)
    size, total, kept_size, kept_total = sums.unbind(1)
    alive = kept_size > 0
    shift = (kept_total / kept_size - total / size)[alive].abs()
    return (
        float(shift.mean()) if len(shift) else None,
        float((~alive).double().mean()),
        float((kept_size / size).mean()),
    )
