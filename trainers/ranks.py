"""What rank 0 does for all ranks."""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from rlq.errors import RlqError


def on_main(accelerator: Accelerator, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0; hand its result, or its rlq error, to every rank, so that no rank is left waiting."""
    if accelerator.num_processes == 1:
        return work()
    payload: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            payload = [work()]
        except RlqError as error:
            payload = [error]
    broadcast_object_list(payload)
    if isinstance(payload[0], RlqError):
        raise payload[0]
    return payload[0]
