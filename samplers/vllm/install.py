"""Ways to put a version into a loaded engine: written in place, through vLLM's reload, or by several ranks.

Each prepares the switch beside the served version and returns it as a function; the engine stands still only while that
function runs.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch

from rlq.errors import SnapshotError
from rlq.publish import Snapshot, TensorSpec, check_specs, combined_digest
from rlq.publish.delta import Delta

from ..transport.shared_memory import FileTicket, SharedMemory
from . import slots
from .sharded import Part, differing_parts, load, misfits, parts
from .staging import Step, prepare, repack

Switch = Callable[[], None]
"""Makes the engine serve what was staged."""


class Installer(Protocol):
    """One way to install, for one engine."""

    count: int
    """Tensors of a version."""

    def stage(self, version: Snapshot | Delta) -> Switch:
        """Check a version that fits the engine's scheme and, if it is a delta, its served version.

        Raises:
            SnapshotError: it does not fit, or is damaged.
        """
        ...

    def digest(self) -> str:
        """Digest of the tensors that the engine holds now."""
        ...

    def close(self) -> None:
        """Release what lies outside the engine."""
        ...


def installer_for(llm: Any, ranks: int) -> Installer:
    """The fastest way that fits an engine; `llm` is vLLM's, across `ranks` processes."""
    llm.apply_model(repack)
    if ranks > 1:
        return Ranks(llm)
    in_place = llm.apply_model(slots.placeable)[0]
    return InPlace(llm) if in_place else Reload(llm)


class OneRank:
    """What the ways of an engine of one process share.

    Args:
        llm: vLLM's engine.
    """

    def __init__(self, llm: Any):
        self.llm = llm
        self.specs: dict[str, TensorSpec] = self.on_model(slots.expected_specs)
        self.count = len(self.specs)

    def on_model(self, function: Callable[[Any], Any]) -> Any:
        """Call with vLLM's model."""
        return self.llm.apply_model(function)[0]

    def check(self, version: Snapshot | Delta) -> None:
        """Raise SnapshotError if a whole version has other tensors than the engine."""
        if isinstance(version, Snapshot):
            check_specs(version.specs, self.specs)

    def digest(self) -> str:
        """See `Installer`."""
        return self.on_model(slots.digest)

    def close(self) -> None:
        """See `Installer`; there is nothing."""


class InPlace(OneRank):
    """Writes into the engine's parameters, which hold what was published: a list of writes, prepared module by module.

    On a CPU all of them are prepared, and checked against the digest, when the version is staged. On a GPU the copies
    beside the served version would take the cache's memory, and making them is fast, so each is prepared as it is
    written.
    """

    def __init__(self, llm: Any):
        super().__init__(llm)
        self._ahead: bool = self.on_model(slots.on_cpu)
        self._digests: dict[str, bytes] = {}  # of the served tensors

    def stage(self, version: Snapshot | Delta) -> Switch:
        """See `Installer`."""
        self.check(version)
        steps: Iterable[Step] = self.on_model(partial(prepare, version=version))
        if self._ahead:
            steps = list(steps)
            digests = dict(self._digests)
            for _, changed in steps:
                digests |= changed
            info = version if isinstance(version, Snapshot) else version.info
            found = combined_digest(digests)
            if found != info.digest:
                raise SnapshotError(
                    f"version {info.version} arrived as {found[:12]}, not {info.digest[:12]}; send it whole, again"
                )
        return partial(self._write, steps)

    def _write(self, steps: Iterable[Step]) -> None:
        for writes, digests in steps:
            for write in writes:
                write.apply()
            self._digests |= digests


class Reload(OneRank):
    """Through vLLM's layer-wise reload, for layers that keep another form of what was published."""

    def stage(self, version: Snapshot | Delta) -> Switch:
        """See `Installer`."""
        self.check(version)
        whole = isinstance(version, Snapshot)
        tensors = version.tensors if whole else self.on_model(partial(slots.touched, version=version))
        return partial(self._reload, tensors)

    def _reload(self, tensors: dict[str, torch.Tensor]) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
        self.on_model(repack)


class Ranks:
    """Through the reload of several processes, each of which cuts its parts from a version in shared memory.

    Args:
        llm: vLLM's engine.
    """

    def __init__(self, llm: Any):
        self.llm = llm
        self.expected: list[dict[str, Part]] = llm.apply_model(partial(parts, hashed=False))
        self.count = len(self.expected[0])
        self._shared = SharedMemory()
        self._served: FileTicket | None = None

    def stage(self, version: Snapshot | Delta) -> Switch:
        """See `Installer`; raises SamplerError if there is no room in shared memory."""
        snap = version if isinstance(version, Snapshot) else version.apply(self._snapshot())
        wrong = misfits(snap, self.expected)
        if wrong:
            raise SnapshotError(
                f"snapshot refused, {len(wrong)} tensors are missing, unexpected or misshapen: {', '.join(wrong[:3])}; "
                "publish exactly the tensors of the sampler's model"
            )
        return partial(self._load, self._shared.send(snap.version, snap))

    def _load(self, ticket: FileTicket) -> None:
        self.llm.collective_rpc(load, args=(ticket,))
        if self._served is not None and self._served != ticket:
            self._shared.release(self._served)
        self._served = ticket
        self.llm.apply_model(repack)

    def _snapshot(self) -> Snapshot:
        """The served version, as it lies in shared memory."""
        assert self._served is not None
        snap = self._served.open()
        assert isinstance(snap, Snapshot)
        return snap

    def digest(self) -> str:
        """Digest of the served version if every rank holds its parts of it, byte for byte; else what differs."""
        snap = self._snapshot()
        wrong = differing_parts(snap, self.llm.apply_model(partial(parts, hashed=True)))
        return f"{len(wrong)} parts differ: {', '.join(wrong[:3])}" if wrong else snap.digest

    def close(self) -> None:
        """Remove what lies in shared memory."""
        self._shared.close()
