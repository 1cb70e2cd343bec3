"""A model of publishing: seconds and bytes against parameters, change rate, publishers, nodes and bandwidth.

Sizes in bytes, times in seconds, rates in bytes per second. docs/scaling.md compares it with measurements and carries
it to sizes that were not measured.
"""

import math
from dataclasses import dataclass

VALUE_BITS = 1.3
"""Entropy of a changed code's step: up or down, and seldom by more than one."""


@dataclass(frozen=True)
class Rates:
    """What one publisher, one sampler and one node do per second."""

    quantize: float
    """bf16 bytes that a publisher casts, checks and quantizes."""
    digest: float
    """Wire bytes that go through SHA-256, on either side."""
    copy: float
    """Wire bytes packed into one buffer."""
    compare: float
    """Wire bytes compared with the version before, and encoded."""
    stage: float
    """Wire bytes that a sampler fetches and dequantizes, while it serves, when a version arrives whole."""
    patch: float
    """Wire bytes that a sampler brings up to date, while it serves, when a delta arrives."""
    network: float
    """Bytes into or out of a node."""


@dataclass(frozen=True)
class Publish:
    """One publish."""

    nbytes: float
    """Bytes that each node receives."""
    quantize_s: float
    """Cast, check, quantize and digest."""
    encode_s: float
    """Compare with the version before and encode, or pack a whole version."""
    ship_s: float
    """Publisher to the last node."""
    stage_s: float
    """Check and prepare on a sampler, while it serves."""

    @property
    def total_s(self) -> float:
        """From the learner's last gradient to samplers that can switch."""
        return self.quantize_s + self.encode_s + self.ship_s + self.stage_s


def delta_bits(changed: float) -> float:
    """Bits per changed element of a delta in which a share `changed` of the elements differs, evenly spread.

    Position: H(c) / c with the binary entropy H; value: `VALUE_BITS`.
    """
    entropy = -changed * math.log2(changed) - (1 - changed) * math.log2(1 - changed)
    return entropy / changed + VALUE_BITS


def fan_out_rounds(nodes: int) -> int:
    """Rounds in which a whole object reaches `nodes` nodes when every holder passes it on: ceil(log2(nodes + 1))."""
    return math.ceil(math.log2(nodes + 1))


def publish(
    params: float, bits: float, rates: Rates, *, nodes: int = 1, publishers: int = 1, changed: float | None = None
) -> Publish:
    """Predict one publish.

    Args:
        params: parameters.
        bits: wire bits per parameter: 8 for FP8 and INT8, 4.5 for NVFP4, 16 for bf16.
        rates: see `Rates`.
        nodes: nodes with samplers; the samplers of a node share one copy.
        publishers: ranks that quantize, digest and encode their shares side by side; rlq today has one.
        changed: share of the codes that changed since the version before; None ships everything.
    """
    wire = params * bits / 8
    share = wire / publishers
    nbytes = wire if changed is None else params * changed * delta_bits(changed) / 8
    return Publish(
        nbytes=nbytes,
        quantize_s=2 * params / publishers / rates.quantize + share / rates.digest,
        encode_s=share / (rates.copy if changed is None else rates.compare),
        ship_s=fan_out_rounds(nodes) * nbytes / rates.network,
        stage_s=wire / rates.digest + wire / (rates.stage if changed is None else rates.patch),
    )
