"""Calls to actors: how long to wait for them, and what they raised."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayTaskError

from rlq.errors import SamplerError

from .fleet import Member

logger = logging.getLogger(__name__)

SLOW_FACTOR, SLOW_S = 4.0, 5.0
"""Once others have answered, an actor gets SLOW_FACTOR times as long as they took, and SLOW_S seconds more."""


def result(ref: ray.ObjectRef) -> Any:
    """`ray.get` that raises the actor's own exception rather than Ray's wrapper around it."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        raise error.cause from None


def answered(
    waiting: dict[ray.ObjectRef, Member], start: float, patience_s: float
) -> Iterator[tuple[ray.ObjectRef, Member]]:
    """Yield calls as they are answered. Slow ones are left behind, to catch up.

    Args:
        waiting: the calls, with the actor that each was made to; the caller may add more meanwhile.
        start: when they were made, in `time.perf_counter` seconds.
        patience_s: seconds to wait for the first answer.

    Raises:
        SamplerError: no answer at all.
    """
    first: float | None = None
    while waiting:
        timeout = patience_s if first is None else SLOW_FACTOR * first + SLOW_S
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout)
        if not done and first is None:
            raise silence(patience_s)
        if not done:
            for member in waiting.values():
                logger.warning("%s is slow; going on without it until it has caught up", member)
            return
        if first is None:
            first = time.perf_counter() - start
        yield done[0], waiting.pop(done[0])


def silence(patience_s: float) -> SamplerError:
    """The error for actors that do not answer."""
    return SamplerError(f"no sampler answered within {patience_s:.0f} s; the run is stopped")
