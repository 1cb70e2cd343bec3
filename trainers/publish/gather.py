"""The only way to the learner's full weights."""

import torch

from ..view import Learner


def full_weights(learner: Learner, *, buffers: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Name and whole tensor of every parameter, a tied one once; several processes gather their shards.

    All ranks enter. In one process the tensors are the learner's own: read them before it trains on. On ranks other
    than 0 of a sharded model the list is empty.

    Args:
        learner: whose weights.
        buffers: with the persistent buffers, as a checkpoint has them.
    """
    model = learner.policy
    several = learner.accelerator.num_processes > 1
    state = learner.accelerator.get_state_dict(learner.model) if several else model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    left_out = tied if buffers else tied | {name for name, _ in model.named_buffers()}
    return [(name, tensor) for name, tensor in state.items() if name not in left_out]
