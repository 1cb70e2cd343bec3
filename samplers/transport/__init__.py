"""How a published version gets from the learner to the samplers' processes: one file and one row each."""

from .base import Ticket, Transport
from .directory import Directory
from .gpu import VllmTransfer
from .object_store import ObjectStore
from .shared_memory import SharedMemory

TRANSPORTS: dict[str, type[Transport]] = {
    "object_store": ObjectStore,
    "shared_memory": SharedMemory,
    "directory": Directory,
    "nccl": VllmTransfer,
    "ipc": VllmTransfer,
}
"""Values of `sampler_transport`."""

__all__ = ["TRANSPORTS", "Directory", "ObjectStore", "SharedMemory", "Ticket", "Transport", "VllmTransfer"]
