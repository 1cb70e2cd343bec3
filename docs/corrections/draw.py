"""Draw the pictures and write the preset table of docs/corrections.md: python docs/corrections/draw.py"""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "corrections.md"
MARKS = "<!-- presets: written by draw.py -->\n", "<!-- end of presets -->\n"
sys.path.insert(0, str(FOLDER.parents[1]))

from rlq.bridge import CORRECTIONS, Correction, RejectRule, correct  # noqa: E402 (found through the path set above)
from rlq.bridge.correction.correction import Denominator  # noqa: E402

INK, FAINT, HOT = "#1f5fa8", "#b8c7d9", "#c0392b"


def weights_of(ell: torch.Tensor, correction: Correction, mask: torch.Tensor | None = None, base: float = -3.0):
    """Output of `correct` for given (B, T) log ratios."""
    mask = torch.ones_like(ell, dtype=torch.bool) if mask is None else mask
    return correct(ell + base, torch.full_like(ell, base), mask, correction)


def curve(axis: Axes, correction: Correction, base: float = -3.0) -> None:
    """Weight of a single token against its ratio."""
    rho = torch.logspace(-1.3, 1.3, 801, dtype=torch.float64)
    out = weights_of(rho.log()[:, None], correction, base=base)
    axis.plot(rho, rho, color=FAINT, lw=1, label="rho")
    weight = torch.where(out.keep[:, 0], out.weights[:, 0], math.nan)
    axis.plot(rho, weight, color=INK, lw=2, label="weight")
    dropped = rho[~out.keep[:, 0]]
    if len(dropped):
        axis.plot(dropped, torch.zeros_like(dropped), ".", ms=2, color=HOT, label="dropped")
    axis.set(xscale="log", xlabel="rho = learner / sampler", ylabel="weight", ylim=(-0.2, 5.2))
    axis.legend(fontsize=7, frameon=False)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    """Two dialogues of 14 places with a tool output inside: (log ratio, mask)."""
    generator = torch.Generator().manual_seed(4)
    ell = 0.35 * torch.randn(2, 14, generator=generator, dtype=torch.float64)
    ell[0, 3], ell[1, 9:] = 1.5, ell[1, 9:] + 0.35
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[:, 6:8] = False
    return ell, mask


def bars(axis: Axes, correction: Correction) -> None:
    """Weights of every token of two dialogues, with the token's own ratio behind."""
    ell, mask = example()
    out = weights_of(ell, correction, mask)
    flat = mask.flatten()
    place = torch.arange(len(flat)) + (torch.arange(len(flat)) >= 14)
    axis.bar(place[flat], ell.exp().flatten()[flat], color=FAINT, label="token rho")
    axis.bar(place[flat], out.weights.flatten()[flat], width=0.45, color=INK, label="weight")
    gone = flat & ~out.keep.flatten()
    if gone.any():
        axis.plot(place[gone], torch.full((int(gone.sum()),), -0.12), "x", ms=4, color=HOT, label="dropped")
    axis.set(xlabel="tokens of two completions", ylim=(-0.3, 4.7), xticks=[])
    axis.legend(fontsize=7, frameon=False, ncols=3, loc="upper center")


def cap_by_ess(axis: Axes) -> None:
    """Effective sample size against the cap, and the cap a target picks."""
    ell = 0.8 * torch.randn(200, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    caps = torch.logspace(0, 1.3, 40)
    ess = [weights_of(ell, Correction(upper=float(c), veto=None)).metrics["ess_applied"] for c in caps]
    chosen = weights_of(ell, Correction(upper=20.0, ess_target=0.7, veto=None)).upper
    axis.plot(caps, ess, color=INK, lw=2)
    axis.axhline(0.7, color=FAINT)
    axis.axvline(chosen, color=HOT, ls="--", label=f"cap {chosen:.2f} for target 0.7")
    axis.set(xscale="log", xlabel="cap", ylabel="ESS of min(rho, cap)")
    axis.legend(fontsize=7, frameon=False)


def normalization(axis: Axes, how: Literal["batch", "self"]) -> None:
    """Weights before and after normalization, where a rule drops some tokens."""
    ell = 0.4 * torch.randn(80, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.3
    plain = Correction(veto=None, reject=[RejectRule("ratio", "token", 0.4, 1.4)])
    for correction, color, name in ((plain, FAINT, "none"), (replace(plain, normalize=how), INK, how)):
        out = weights_of(ell, correction)
        share = float(out.weights.sum()) / out.denominator
        axis.hist(out.weights[out.keep], bins=40, color=color, alpha=0.8, label=f"{name}: {share:.2f}")
    axis.set(xlabel="weight of kept tokens", ylabel="tokens", xlim=(0.3, 2.6))
    axis.legend(fontsize=7, frameon=False, title="sum of weights / denominator", title_fontsize=7)


def denominators(axis: Axes) -> None:
    """Size of the loss against the share of tokens that a band drops."""
    generator = torch.Generator().manual_seed(0)
    ell = 0.3 * torch.randn(100, 50, generator=generator, dtype=torch.float64)
    for rule, color in zip(get_args(Denominator), (INK, HOT), strict=True):
        points = []
        for width in torch.linspace(0.02, 1.0, 30).tolist():
            band = Correction(mode="mask", lower=math.exp(-width), upper=math.exp(width), veto=None, denominator=rule)
            out = weights_of(ell, band)
            points.append((1 - out.metrics["kept_token_frac"], float(out.weights.sum()) / out.denominator))
        axis.plot(*zip(*points, strict=True), color=color, lw=2, label=f"denominator={rule}")
    axis.set(xlabel="share of tokens dropped", ylabel="sum of weights / denominator", ylim=(0, 1.2))
    axis.legend(fontsize=7, frameon=False)


def plane(axis: Axes, correction: Correction) -> None:
    """Kept region over learner and sampler probability of one token."""
    p = torch.linspace(0.002, 0.998, 160, dtype=torch.float64)
    learner, sampler = torch.meshgrid(p, p, indexing="ij")
    flat = [x.log().reshape(-1, 1) for x in (learner, sampler)]
    out = correct(flat[0], flat[1], torch.ones_like(flat[0], dtype=torch.bool), correction)
    axis.imshow(
        out.keep.view(160, 160).double(), origin="lower", extent=(0, 1, 0, 1), cmap="Blues", vmin=-0.3, vmax=1.6
    )
    axis.plot([0, 1], [0, 1], color=INK, lw=1)
    axis.set(xlabel="p sampler", ylabel="p learner", aspect="auto")
    axis.text(0.35, 0.47, "kept", fontsize=8, color=INK)


def rejecting(*rules: RejectRule) -> Correction:
    return Correction(mode="none", veto=None, reject=rules)


PICTURES = {
    "none": lambda a: curve(a, Correction(mode="none", veto=None)),
    "truncate": lambda a: curve(a, Correction(veto=None)),
    "clip": lambda a: curve(a, Correction(mode="clip", lower=0.5, upper=2.0, veto=None)),
    "mask": lambda a: curve(a, Correction(mode="mask", lower=0.5, upper=2.0, veto=None)),
    "token": lambda a: bars(a, Correction(upper=math.inf, veto=None)),
    "sequence": lambda a: bars(a, Correction(level="sequence", upper=4.0, veto=None)),
    "geometric": lambda a: bars(a, Correction(level="geometric", upper=2.0, veto=None)),
    "segment": lambda a: bars(a, Correction(level="segment", upper=2.0, veto=None)),
    "reject_ratio": lambda a: bars(a, rejecting(RejectRule("ratio", "mean", 0.87, 1.15))),
    "reject_max": lambda a: bars(a, rejecting(RejectRule("ratio", "max", upper=4.0))),
    "reject_k2": lambda a: plane(a, rejecting(RejectRule("k2", "token", upper=1.0))),
    "reject_k3": lambda a: plane(a, rejecting(RejectRule("k3", "token", upper=1.0))),
    "reject_abs": lambda a: plane(a, rejecting(RejectRule("abs", "token", upper=1.5))),
    "reject_prob_diff": lambda a: plane(a, rejecting(RejectRule("prob_diff", "token", -0.2, 0.2))),
    "veto": lambda a: bars(a, Correction(veto=(0.2, 4.0))),
    "normalize_batch": lambda a: normalization(a, "batch"),
    "normalize_self": lambda a: normalization(a, "self"),
    "ess_target": cap_by_ess,
    "denominator": denominators,
}


def preset_table() -> str:
    """Every preset as a row, notes numbered below; miles/ has the rows of slime/."""
    shown = {name: preset for name, preset in CORRECTIONS.items() if not name.startswith("miles/")}
    notes = list(dict.fromkeys(preset.note for preset in shown.values() if preset.note))
    lines = ["| preset | the peer's own names | note |", "|---|---|---|"]
    for name, preset in shown.items():
        number = f"{notes.index(preset.note) + 1}" if preset.note else ""
        lines.append(f"| `{name}` | {preset.source}{' (bypass)' if preset.bypass else ''} | {number} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""])


def with_presets(page: str) -> str:
    """The page with the preset table between the marks written anew."""
    before, rest = page.split(MARKS[0])
    return before + MARKS[0] + preset_table() + MARKS[1] + rest.split(MARKS[1])[1]


def main() -> None:
    """Write the table into the page and one PNG per picture beside this script."""
    PAGE.write_text(with_presets(PAGE.read_text()))
    for name, draw in PICTURES.items():
        figure = Figure(figsize=(4.6, 2.5), layout="constrained")
        axis = figure.subplots()
        draw(axis)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
        figure.savefig(FOLDER / f"{name}.png", dpi=80, metadata={"Software": None})


if __name__ == "__main__":
    main()
