"""Linear layers with weights kept in the matrix unit's own layout, for as long as a sampler runs.

A plain bf16 product rearranges its weights at every call, which at 64 rows takes as long as the product itself. Here
the rearranged copies are made once per set of weights. They cost the size of the linear weights again; the model's own
parameters are not touched, and outside `with packed:` its layers are its own.
"""

from collections.abc import Callable
from types import TracebackType

import torch


def is_useful(model: torch.nn.Module) -> bool:
    """Tell whether the model is on a CPU that multiplies bf16 by oneDNN, in bf16."""
    weight = next(model.parameters(), None)
    if weight is None or not weight.is_cpu or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinears:
    """A context manager: inside, the model's plain linear layers multiply by their packed weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._forwards: list[tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]] = []
        packed: dict[int, torch.Tensor] = {}
        for module in model.modules():
            # a subclass may compute something else; a module with a forward of its own is someone else's patch
            if type(module) is not torch.nn.Linear or "forward" in module.__dict__:
                continue
            weight = module.weight
            if weight.dtype != torch.bfloat16 or not weight.is_contiguous():
                continue
            if weight.data_ptr() not in packed:
                packed[weight.data_ptr()] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
            self._forwards.append((module, _forward(packed[weight.data_ptr()], module.bias)))
        self.num_bytes = sum(t.numel() * t.element_size() for t in packed.values())

    def __enter__(self) -> None:
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for module, _ in self._forwards:
            module.__dict__.pop("forward", None)


def _forward(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return multiply(hidden, weight, bias, "none", [], "")

    return forward
