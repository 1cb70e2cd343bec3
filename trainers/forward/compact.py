"""Forward passes without waste: TRL pads every row to the longest completion, and repeats a prompt for its whole group.

Axes: B rows, L columns, H hidden size.
"""

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# A call with anything else (images, caches, router losses) means more than hidden states; it is left alone.
UNDERSTOOD = {"input_ids", "attention_mask", "use_cache"}

# In tokens; below this, launch overhead dominates a forward pass.
WORTH_A_PASS = 1024


def compact_forward(
    model: Any, buckets: int, prompt_width: Callable[[], int] | None, *, score_once: bool = False
) -> None:
    """Make `model` skip padding, and compute each distinct prompt once (as Prefix Grouper does, arXiv 2506.05433).

    Rows are computed in `buckets` groups of similar length, each without the columns it only pads. Where several rows
    have one prompt, its keys and values are computed once and its gradients add up there. Hidden states of real tokens
    and all gradients stay the same up to kernel rounding; hidden states of padding become zero. Calls with a cache or
    with other inputs are untouched. Prompts are not shared under gradient checkpointing, which allows no cache, nor by
    models whose cache is not plain keys and values.

    Args:
        model: a causal language model of transformers, or a PEFT wrapper around one.
        buckets: most groups per forward pass; a small batch makes fewer.
        prompt_width: tells how many columns hold prompts in what the model gets next; 0 shares nothing. None is for
            ranks that shard weights, which have to agree on the number of passes: nothing is shared, and only the
            number of rows counts.
        score_once: keep the graph of a forward pass without gradients, in training, for the next pass with gradients on
            the same rows in whatever order: GRPO scores a batch and then learns from it with the same weights. Only
            for batches that are learned from at once, without a reference policy behind the same model.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    backbone = inner.base_model
    scored: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}  # by module, so that a deep copy finds nothing

    def forward(self, *args, **kwargs):
        plain = types.MethodType(type(self).forward, self)
        mask = kwargs.get("attention_mask")
        if args or set(kwargs) != UNDERSTOOD or kwargs["use_cache"] is not False or mask is None or mask.ndim != 2:
            return plain(*args, **kwargs)
        ids = kwargs["input_ids"]
        if not (score_once and self.training):
            return compute(self, plain, ids, mask)
        if torch.is_grad_enabled():
            out = _reordered(scored.pop(id(self), None), ids, mask)
            return compute(self, plain, ids, mask) if out is None else out
        with torch.enable_grad():
            out = compute(self, plain, ids, mask)
        scored[id(self)] = ids.clone(), mask.clone(), copy.copy(out)
        out.last_hidden_state = out.last_hidden_state.detach()
        return out

    def compute(self, plain: Callable, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        if prompt_width is None:
            return _without_padding(plain, ids, mask, buckets)
        width, worth = prompt_width(), max(1, min(buckets, int(mask.sum()) // WORTH_A_PASS))
        if 0 < width < ids.shape[1] and not self.is_gradient_checkpointing:
            out = _with_shared_prompts(plain, ids, mask, width, worth)
            if out is not None:
                return out
        return _without_padding(plain, ids, mask, worth)

    # A bound method, unlike a closure over the module, follows the module when it is deep-copied.
    backbone.forward = types.MethodType(forward, backbone)


def _without_padding(plain: Callable, ids: torch.Tensor, mask: torch.Tensor, buckets: int) -> Any:
    order, parts = [], []
    for rows, first, last in length_buckets(mask, buckets):
        out = plain(
            input_ids=ids[rows, first:last],
            attention_mask=mask[rows, first:last],
            position_ids=_columns(first, last, mask),  # as the padded call would number them
            use_cache=False,
        )
        order.append(rows)
        parts.append(_widen(out.last_hidden_state, first, mask.shape[1]))
    out.last_hidden_state = torch.cat(parts)[torch.cat(order).argsort()]
    return out


def _with_shared_prompts(plain: Callable, ids: torch.Tensor, mask: torch.Tensor, width: int, buckets: int) -> Any:
    """None if too few rows share a prompt, or the model's cache cannot be shared."""
    prompts = torch.where(mask[:, :width].ne(0), ids[:, :width], -1)
    distinct, which = torch.unique(prompts, dim=0, return_inverse=True)
    if 2 * len(distinct) > len(ids):
        return None
    row_of = torch.empty(len(distinct), dtype=torch.long, device=ids.device).scatter_(
        0, which, torch.arange(len(ids), device=ids.device)
    )
    first = int(mask[:, :width].any(0).int().argmax())
    start = plain(
        input_ids=ids[row_of, first:width],
        attention_mask=mask[row_of, first:width],
        position_ids=_columns(first, width, mask),
        use_cache=True,
    )
    layers = getattr(start.past_key_values, "layers", ())
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        return None
    order, parts = [], []
    for rows, _, last in length_buckets(mask[:, width:], buckets):
        cache = DynamicCache()
        for index, layer in enumerate(layers):
            cache.update(layer.keys[which[rows]], layer.values[which[rows]], index)
        out = plain(
            input_ids=ids[rows, width : width + last],
            attention_mask=mask[rows, first : width + last],
            position_ids=_columns(width, width + last, mask),
            past_key_values=cache,
            use_cache=True,
        )
        order.append(rows)
        parts.append(_widen(out.last_hidden_state, 0, mask.shape[1] - width))
    completions = torch.cat(parts)[torch.cat(order).argsort()]
    out.last_hidden_state = torch.cat([_widen(start.last_hidden_state, first, width)[which], completions], dim=1)
    out.past_key_values = None
    return out


def _reordered(scored: tuple[torch.Tensor, torch.Tensor, Any] | None, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    """The scored pass with its rows in the order of `ids`, or None if it was of other rows."""
    if scored is None or scored[0].shape != ids.shape:
        return None
    old_ids, old_mask, out = scored
    weights = torch.randint(-(1 << 62), 1 << 62, (ids.shape[1],), generator=torch.Generator().manual_seed(0))
    old, new = ((rows * weights.to(rows.device)).sum(1) for rows in (old_ids, ids))  # int64 wraps: a hash
    rows = torch.empty_like(new)
    rows[new.argsort()] = old.argsort()
    if not (torch.equal(old_ids[rows], ids) and torch.equal(old_mask[rows], mask)):
        return None
    out.last_hidden_state = out.last_hidden_state[rows]
    return out


def length_buckets(mask: torch.Tensor, buckets: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Split rows by length: yields (row indices, first column, one past the last column) of every group.

    Args:
        mask: (B, L), nonzero at real tokens; padding may lie on both sides.
        buckets: groups; sizes differ by at most one row.
    """
    real = mask.ne(0)
    some = real.any(1)
    first = torch.where(some, real.int().argmax(1), 0)
    last = torch.where(some, real.shape[1] - real.flip(1).int().argmax(1), 1)
    for rows in (last - first).argsort(stable=True).tensor_split(min(buckets, len(mask))):
        yield rows, int(first[rows].min()), int(last[rows].max())


def _columns(first: int, last: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(first, last, device=like.device)[None]


def _widen(hidden: torch.Tensor, first: int, width: int) -> torch.Tensor:
    """(B, n, H) to (B, width, H), zero outside of the n columns from `first`."""
    return torch.nn.functional.pad(hidden, (0, 0, first, width - first - hidden.shape[1]))
