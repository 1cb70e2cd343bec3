"""The emulated low-precision linear: one function for the vLLM plugin, and a module for models of transformers."""

import torch

from ..errors import ConfigError
from ..formats.schemes import LayerScheme, TensorScheme
from ..quantize import QuantizedTensor, largest_magnitude, quantize, quantize_activations
from ..weights.quantize import input_scale_suffix


def emulated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activations: TensorScheme | None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute y = Q(x) W^T + b with the values that a low-precision kernel multiplies, accumulated in `x.dtype`.

    The gradient of `x` is that of a plain linear at Q(x) (straight through, Bengio et al. 2013, arXiv:1308.3432).

    Args:
        x: (..., in) activations.
        weight: (out, in) dequantized weight in `x.dtype`.
        bias: (out,) or None.
        activations: scheme of Q; None leaves `x` alone. NaN and infinity come out as NaN.
        input_scale: calibrated scale of the whole input, fp32 (1,); None computes scales from `x`.
    """
    if activations is not None:
        x = straight_through(x, quantize_activations(x.detach(), activations, input_scale))
    return torch.nn.functional.linear(x, weight, bias)


def quantize_heads(x: torch.Tensor, kv_cache: str, head_size: int, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Round keys or values as they enter the cache.

    Args:
        x: (..., heads * head_size) or (..., heads, head_size).
        kv_cache: one of `rlq.formats.schemes.KV_CACHES`.
        head_size: elements that share a scale, where scales are computed.
        scale: calibrated scale of all of them, fp32 (1,), for the `tensor` caches.
    """
    element, _, granularity = kv_cache.partition(".")
    heads = x.reshape(-1, head_size)
    return quantize_activations(heads, TensorScheme(element, granularity or "token"), scale).view(x.shape)


def straight_through(x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """`rounded`, whose gradient goes to `x` as if nothing had been rounded."""
    return _StraightThrough.apply(x, rounded) if torch.is_grad_enabled() and x.requires_grad else rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None


class EmulatedLinear(torch.nn.Module):
    """A linear layer that computes what a sampler computes.

    Frozen, it holds published values, see `load`. Trainable, it holds the master weight and bias of the layer that it
    replaces, and computes with what would be published of them now: dequantize(quantize(bf16(w))). Gradients go
    straight through every rounding: dL/dx = g Q(w), dL/dw = g^T Q(x).

    Args:
        linear: the layer that it replaces.
        scheme: how the layer is quantized.
        trainable: see above.
    """

    input_scale: torch.Tensor | None
    """Calibrated scale of the input as it is published, fp32 (1,); needed by a static scheme."""
    fused: "tuple[EmulatedLinear, ...]"
    """Trainable layers that share scales with this one, itself included; see `rlq.formats.modules.FUSED`."""

    def __init__(self, linear: torch.nn.Linear, scheme: LayerScheme, *, trainable: bool = False):
        super().__init__()
        self.scheme = scheme
        self.trainable = trainable
        self.input_scale = None
        self.fused = (self,)
        if trainable:
            self.weight = linear.weight
        else:
            self.weight = torch.nn.Parameter(torch.empty_like(linear.weight), requires_grad=False)
        self.bias = linear.bias

    def load(self, wire: dict[str, torch.Tensor]) -> None:
        """Take the layer's wire tensors; a frozen layer's."""
        assert self.scheme.weights is not None
        weight = QuantizedTensor.from_wire(wire, self.scheme.weights, self.weight.shape[1])
        self.weight.copy_(weight.dequantize(self.weight.dtype))
        if self.scheme.static:
            assert self.scheme.activations is not None
            self.input_scale = wire[input_scale_suffix(self.scheme.activations)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply; raises ConfigError if the input's scale is static and nobody set it."""
        if self.scheme.static and self.input_scale is None:
            raise ConfigError("a static scheme needs the input's scale; calibrate first, or use a dynamic scheme")
        weight, bias = self.weight, self.bias
        if self.trainable:
            weight = straight_through(weight, self._published(x.dtype))
            bias = None if bias is None else straight_through(bias, bias.detach().bfloat16().to(bias.dtype))
        return emulated_linear(x, weight, bias, self.scheme.activations, self.input_scale)

    @torch.no_grad()
    def _published(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as a sampler would get it now."""
        assert self.scheme.weights is not None
        amax = None
        if len(self.fused) > 1 and self.scheme.weights.spans_tensor:
            amax = torch.cat([largest_magnitude(layer.weight.detach().bfloat16()) for layer in self.fused]).max()
        return quantize(self.weight.detach().bfloat16(), self.scheme.weights, amax=amax).dequantize(dtype)
