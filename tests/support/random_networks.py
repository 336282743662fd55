"""Networks of steps that are drawn, each over values that were made before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck
from torch import Tensor, nn

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


class Steps(nn.Module):
    """Steps over a growing list of values; each names its operands and makes a new value.

    steps    (kind, number of the first operand, what else the kind takes)
    modules  a module for each step that has one
    outputs  numbers of the values that are returned
    """

    def __init__(
        self, steps: Sequence[tuple[Any, ...]], modules: Sequence[nn.Module | None], outputs: Sequence[int]
    ) -> None:
        super().__init__()
        self.steps, self.outputs = steps, outputs
        self.parts = nn.ModuleList([nn.Identity() if module is None else module for module in modules])

    def forward(self, x: Tensor) -> Any:
        """Return a value, or a tuple of several."""
        values = [x]
        for (kind, *rest), module in zip(self.steps, self.parts, strict=True):
            values.append(self.step(kind, rest, module, values))
        results = tuple(self.finish(values[i], i) for i in self.outputs)
        return results[0] if len(results) == 1 else results

    @abstractmethod
    def step(self, kind: str, rest: list[Any], module: Any, values: list[Tensor]) -> Tensor:
        """One value more."""

    def finish(self, value: Tensor, number: int) -> Tensor:
        """What is returned of value `number`."""
        return value
