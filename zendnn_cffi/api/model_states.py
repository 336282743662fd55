"""States that a model goes back to: an adapter after another one, an adapter switched off for some calls.

Tracing takes seconds, so what was made for a state is kept for a while after the model has left it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zendnn_cffi.values import dataclass

if TYPE_CHECKING:
    from fx_passes.model_watch import ModelWatch
    from fx_passes.module import OptimizedModule

_KEPT = 3  # states beside the present one; all but the last one left are packed again when the model is back
_LONGEST_WAIT = 64  # calls
_SAMPLED = 512  # numbers of each parameter


@dataclass(frozen=True)
class ModelState:
    """What was made of a model as it was.

    refused  so many times optimize() refused it
    sample   some of its numbers: adapters are merged through .data, which no counter counts
    """

    watch: ModelWatch
    fast: OptimizedModule | None
    refused: int
    sample: list[Any]


class EarlierStates:
    """The last states that a model left.

    wait  calls that a new state has to last before it is optimized: more, the more states were made for nothing
    """

    def __init__(self) -> None:
        self.wait = 1
        self._states: list[ModelState] = []

    def add(self, state: ModelState) -> None:
        """The model is in another state now."""
        self._states = [each for each in (state, *self._states) if each.watch.has_its_memory()]
        for left in self._states[1:]:
            for region in left.fast.regions().values() if left.fast is not None else ():
                region.invalidate()
        if len(self._states) > _KEPT:
            self._states.pop()
            self.wait = min(2 * self.wait, _LONGEST_WAIT)

    def taken(self, model: nn.Module) -> ModelState | None:
        """The state that the model is in again; it is none of these any longer."""
        for state in self._states:
            if state.watch.unchanged():
                self._states.remove(state)
                return state if state.sample == sample_of(model) else None
        return None


def sample_of(model: nn.Module) -> list[Any]:
    """Some numbers of each parameter and buffer, spread over it, as bytes."""
    return [_some(tensor) for tensor in (*model.parameters(), *model.buffers())]


def _some(tensor: torch.Tensor) -> bytes | None:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    if not tensor.is_contiguous() or tensor.is_quantized:
        return None
    flat = tensor.detach().view(-1)
    step = max(1, flat.numel() // _SAMPLED) | 1  # odd: not the same column of each row
    return bytes(flat[::step].contiguous().view(torch.uint8).numpy())
