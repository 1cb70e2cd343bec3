"""What a subcommand hands back to `rlq`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What a subcommand found; it has printed its own tables by then."""

    report: Mapping[str, Any]
    """What `--json FILE` receives. JSON knows neither NaN nor infinity: they become null."""
    ok: bool = True
    """False gives exit code 1."""
