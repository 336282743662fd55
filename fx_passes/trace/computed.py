"""What a forward computes from parameters and buffers while torch.fx traces it, and a graph would keep for good.

    return x + sum(p.sum() for p in self.parameters())        one number, of the values while it was traced
    return x + self.state_dict()["layer.weight"].sum()
    return x * self.scale.sum()                               none: torch.fx has nodes for it
    return x.to(next(self.parameters()).dtype)                none: writes leave it as it is

torch.fx stands for what a forward reads by its name. Other ways, such as parameters(), hand out the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# Those that return no tensor, and yet what is in one.
_NUMBERS = ("__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "allclose",
            "equal", "is_nonzero", "item", "numpy", "tolist")  # fmt: skip


@contextmanager
def computing_noted(root: nn.Module) -> Iterator[list[str]]:
    """Yield a list that gets the name of a function of PyTorch's which is called with a tensor of root, not traced."""
    found: list[str] = []
    with _Noting([*root.parameters(), *root.buffers()], found):
        yield found


class _Noting(TorchFunctionMode):
    def __init__(self, held: list[torch.Tensor], found: list[str]) -> None:
        super().__init__()
        self._held = {id(tensor) for tensor in held}
        self._found = found

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tells = name in _NUMBERS or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result))
        if tells and any(id(leaf) in self._held for leaf in pytree.tree_leaves((args, kwargs))):
            self._found.append(name)
        return result
