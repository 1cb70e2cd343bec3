"""A transformers model that computes what a sampler computes: dequantized weights, rounded activations."""

import torch

from .linear import emulated_linear
from .publish import Snapshot
from .quantize import QuantizedTensor
from .quantize.model import INPUT_GLOBAL_SCALE, INPUT_SCALE
from .schemes import LayerScheme, Scheme


class EmulatedLinear(torch.nn.Module):
    """A linear layer that holds published tensors and multiplies through `rlq.linear.emulated_linear`."""

    def __init__(self, linear: torch.nn.Linear, scheme: LayerScheme):
        super().__init__()
        self.scheme = scheme
        self.input_scale: torch.Tensor | None = None
        self.weight = torch.nn.Parameter(torch.empty_like(linear.weight), requires_grad=False)
        self.bias = linear.bias

    def load(self, wire: dict[str, torch.Tensor]) -> None:
        """Take the layer's wire tensors."""
        assert self.scheme.weights is not None
        weight = QuantizedTensor.from_wire(wire, self.scheme.weights, self.weight.shape[1])
        self.weight.copy_(weight.dequantize(self.weight.dtype))
        self.input_scale = wire.get(INPUT_SCALE, wire.get(INPUT_GLOBAL_SCALE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return emulated_linear(x, self.weight, self.bias, self.scheme.activations, self.input_scale)


def emulate(model: torch.nn.Module, scheme: Scheme) -> None:
    """Replace, in place, every linear that `scheme` quantizes by an `EmulatedLinear`."""
    for name, module in list(model.named_modules()):
        layer = scheme.layer(name)
        if isinstance(module, torch.nn.Linear) and layer.weights is not None:
            model.set_submodule(name, EmulatedLinear(module, layer))


@torch.no_grad()
def load_snapshot(model: torch.nn.Module, snap: Snapshot) -> None:
    """Load a snapshot into a model prepared by `emulate`."""
    modules = dict(model.named_modules())
    wires: dict[EmulatedLinear, dict[str, torch.Tensor]] = {}
    for name, tensor in snap.tensors.items():
        owner, _, leaf = name.rpartition(".")
        module = modules[owner]
        if isinstance(module, EmulatedLinear) and leaf != "bias":
            wires.setdefault(module, {})[leaf] = tensor
        else:
            module.get_parameter(leaf).copy_(tensor)
    for module, wire in wires.items():
        module.load(wire)
