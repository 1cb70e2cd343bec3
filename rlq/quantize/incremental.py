"""Bring the codes and scales of one version of a tensor up to date with the next, encoding only what changed."""

import torch

from ..errors import ConfigError
from . import dispatch, reference
from .tensor import QuantizedTensor


def requantize_(
    q: QuantizedTensor, old: torch.Tensor, new: torch.Tensor, *, amax: torch.Tensor | float | None = None
) -> QuantizedTensor:
    """Turn `quantize(old)` into `quantize(new)`, in place, bit for bit.

    Where a scale spans the tensor, only what changed is encoded again. Otherwise everything is: that takes one pass
    over `new`, and finding the changes would take one over `old` as well.

    Args:
        q: codes and scales of `old`; its tensors are overwritten.
        old: the tensor that `q` was made from.
        new: its next version, same shape and type.
        amax: as for `quantize`.

    Returns:
        `q`.

    Raises:
        ConfigError: shapes or types differ.
        SnapshotError: `new` holds NaN or infinity; `q` may have been overwritten in part and must be made anew.
    """
    if old.shape != new.shape or old.dtype != new.dtype or q.shape != new.shape:
        raise ConfigError(
            f"cannot update {tuple(q.shape)} from {tuple(old.shape)} to {tuple(new.shape)}; quantize it anew"
        )
    fast = dispatch._cpu(new)
    in_place = amax is None and not reference.spans_tensor(q.scheme)
    if fast is not None and in_place and fast.can_encode(q.scheme, new.shape):
        fast.encode_into(q, new)
        dispatch.check_scales(q, new)
        return q
    if fast is None or not fast.can_update(q.scheme, old, new):
        return _overwrite(q, dispatch.quantize(new, q.scheme, amax=amax))
    top_old, top_new = fast.update(q, old, new)
    if not top_new < torch.inf:
        raise dispatch.refusal(new)
    if _tensor_scale_may_change(q, new, amax, top_old, top_new):
        return _overwrite(q, dispatch.quantize(new, q.scheme, amax=amax))
    return q


def _tensor_scale_may_change(
    q: QuantizedTensor, new: torch.Tensor, amax: torch.Tensor | float | None, top_old: float, top_new: float
) -> bool:
    """True unless the scale that spans the tensor is known to be the one that `q` was updated with."""
    present = q.scale if q.global_scale is None else q.global_scale

    def scale_of(value: torch.Tensor | float) -> torch.Tensor:
        return reference.tensor_scale(torch.as_tensor(value, dtype=torch.float32).reshape(1), q.scheme)

    if amax is not None:
        return bool(scale_of(amax) != present)
    # The scale grows with the largest magnitude, NVFP4's divisor falls; both are functions of it alone. If nothing that
    # changed had the largest magnitude, that is still there, and it is a question of whether something exceeds it.
    was, becomes = scale_of(top_old), scale_of(top_new)
    inside = was < present and becomes <= present if q.global_scale is None else was > present and becomes >= present
    if bool(inside):
        return False
    return bool(scale_of(dispatch.largest_magnitude(new)) != present)


def _overwrite(q: QuantizedTensor, fresh: QuantizedTensor) -> QuantizedTensor:
    q.codes.view(torch.uint8).copy_(fresh.codes.view(torch.uint8))
    q.scale.view(torch.uint8).copy_(fresh.scale.view(torch.uint8))
    if q.global_scale is not None and fresh.global_scale is not None:
        q.global_scale.copy_(fresh.global_scale)
    return q
