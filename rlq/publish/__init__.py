"""Publish: a bf16 checkpoint becomes a digested snapshot, whole, as a delta, or in a directory."""

from .make import Snapshot, snapshot

__all__ = ["Snapshot", "snapshot"]
