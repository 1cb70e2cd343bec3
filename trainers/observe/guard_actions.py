"""The guard's actions: tighten the correction, keep layers in bf16, fall back to bf16, stop."""

import logging
from dataclasses import replace
from pathlib import Path

from rlq.bridge import Guard, GuardRule, tightened
from rlq.formats.modules import fused_siblings
from rlq.formats.schemes import Scheme
from rlq.quantize import fake_quantize
from rlq.weights.canonical import bf16_checkpoint

from ..publish.gather import full_weights
from ..ranks import on_main
from ..tracking import records
from ..view import Learner

logger = logging.getLogger(__name__)

PROMOTED_FRACTION = 0.1
"""Of the quantized modules, per `promote_layers`."""


class GuardActions:
    """Feeds the guard and carries its decisions out.

    Args:
        learner: whom they concern.
        rules: the guard's rules.
        scheme: what the samplers serve at first.
        run_dir: where guard.jsonl goes.
    """

    def __init__(self, learner: Learner, rules: tuple[GuardRule, ...], scheme: Scheme, run_dir: Path):
        self.learner, self.scheme, self.run_dir = learner, scheme, run_dir
        self.guard = Guard(rules=rules)
        self.state = self.guard.start()
        self.stopped: str | None = None
        """Why the guard ended the run."""

    def step(self, metrics: dict[str, float]) -> None:
        """Show the guard a step's metrics, and act."""
        self.state, decisions = self.guard.step(self.state, metrics, self.learner.version)
        for decision in decisions:
            if self.learner.accelerator.is_main_process:
                logger.warning("guard: %s", decision.message)
                records.append(self.run_dir / "guard.jsonl", decision.record())
                _alert(decision.message)
            self._act(decision.action, decision.message)

    def _act(self, action: str, message: str) -> None:
        if action == "tighten":
            self.learner.correction = tightened(self.learner.correction)
        elif action == "promote_layers" and self.scheme.weights is not None:
            self._change_scheme(without_worst_modules(self.learner, self.scheme, PROMOTED_FRACTION))
        elif action == "fallback_bf16" and self.scheme.weights is not None:
            self._change_scheme(Scheme.preset("bf16"))
        elif action == "stop":
            self.stopped = message

    def _change_scheme(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.learner.change_scheme(scheme)


def without_worst_modules(learner: Learner, scheme: Scheme, fraction: float) -> Scheme:
    """Return `scheme` with the worst-quantized modules added to `ignore`, their fused siblings included.

    Worst is the largest relative error ||w - Q(w)|| / ||w|| of the weight. All ranks enter.
    """
    named = full_weights(learner)

    def promoted() -> list[str]:
        errors: dict[str, float] = {}
        for name, weight in bf16_checkpoint(named).items():
            module = name.removesuffix(".weight")
            layer = scheme.for_module(module, weight.ndim) if module != name else None
            if layer is not None:
                w = weight.float()
                errors[module] = float((w - fake_quantize(w, layer)).norm() / w.norm().clamp(min=1e-30))
        count = max(1, round(fraction * len(errors)))
        worst = sorted(errors, key=errors.__getitem__, reverse=True)[:count]
        return sorted({sibling for module in worst for sibling in fused_siblings(module)})

    return replace(scheme, ignore=(*scheme.ignore, *on_main(learner.accelerator, promoted)))


def _alert(message: str) -> None:
    import wandb

    if wandb.run is not None:
        wandb.run.alert(title="rlq guard", text=message)
