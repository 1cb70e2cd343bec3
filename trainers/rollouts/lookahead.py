"""Which prompts come next: an iterator over an epoch's batches that reads a little ahead."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any


class LookAhead(Iterator[Any]):
    """Yields what `batches` yields, and can say which generation batches will follow.

    TRL's loader repeats a generation batch `repeats` times in a row, once per micro-step that it serves.

    Args:
        batches: iterator of one epoch.
        repeats: times that each generation batch is repeated.
    """

    def __init__(self, batches: Iterator[Any], repeats: int):
        self.batches, self.repeats = batches, repeats
        self._unread: deque[Any] = deque()  # taken from `batches`, not yet yielded
        self._ahead: deque[Any] = deque()  # generation batches that training has not begun
        self._taken = 0

    def __next__(self) -> Any:
        if not self._unread:
            self._take()
        return self._unread.popleft()

    def _take(self) -> None:
        batch = next(self.batches)
        self._unread.append(batch)
        if self._taken % self.repeats == 0:
            self._ahead.append(batch)
        self._taken += 1

    def begin(self) -> None:
        """Training begins the next generation batch."""
        self._ahead.popleft()

    def upcoming(self, count: int) -> list[Any]:
        """The next `count` generation batches that training has not begun; fewer at the end of an epoch."""
        try:
            while len(self._ahead) < count:
                self._take()
        except StopIteration:
            pass
        return list(islice(self._ahead, count))
