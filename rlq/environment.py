"""Facts about the environment that a run depends on."""

import netrc
import os
from pathlib import Path


def wandb_mode() -> tuple[str, str]:
    """Mode that a run will log in (`online`, `offline` or what WANDB_MODE says), and why; asks no network."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode, "from WANDB_MODE"
    if os.environ.get("WANDB_API_KEY"):
        return "online", "key in WANDB_API_KEY"
    if any("wandb" in host for host in _netrc_hosts()):
        return "online", "key in netrc"
    return "offline", "no key found; `wandb login` goes online, `wandb sync` uploads later"


def _netrc_hosts() -> list[str]:
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return list(netrc.netrc(path).hosts)
    except (FileNotFoundError, netrc.NetrcParseError):
        return []
