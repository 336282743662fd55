"""A submodule of a model that stays PyTorch's computes by an optimized module: its forward is replaced.

The tree, its names and its parameters stay what they were; hooks of the submodule are run around it as before.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from fx_passes.module import OptimizedModule


class SubmoduleForward:
    """What stands in a submodule's `forward`.

    module     the submodule
    optimized  computes in its place; None: PyTorch does, as in copies until they have optimized modules of their own
    """

    is_of_class = True  # what it computes is the forward of the submodule's class: fx_passes.graph.hooks

    def __init__(self, module: nn.Module, optimized: OptimizedModule | None = None) -> None:
        self.module = module
        self.optimized = optimized
        self.__signature__ = inspect.signature(type(module).forward.__get__(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compute = self.plain if self.optimized is None else self.optimized.forward
        return compute(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The submodule's own forward."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> SubmoduleForward:
        return SubmoduleForward(copy.deepcopy(self.module, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.module,)


def _unpickled(module: nn.Module) -> SubmoduleForward:
    """The module's attributes come after this: it refers to itself."""
    return SubmoduleForward(module)


def plain_forward(module: nn.Module) -> Any:
    """The module's forward without an optimized module in its place."""
    forward = module.forward
    return forward.plain if isinstance(forward, SubmoduleForward) else forward
