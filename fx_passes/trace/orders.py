"""Tensors that already have the order asked for: `x.contiguous()` is x then, and torch.export notes nothing.

    Traced:  y = x.contiguous()       x in rows: y is x, and the graph has no such operation
    Called:  x transposed             y is a copy, to which forward may write, and which it may return

PyTorch's method looks at the strides before it asks the operator. Here the operator is asked, of an alias: what it
returns is what it was given, which would be known by the operator's name from there on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
# Methods, and the order in memory that they give where none is named.
_USUAL: dict[Any, torch.memory_format] = {
    torch.Tensor.contiguous: torch.contiguous_format,
    torch.Tensor.to: torch.preserve_format,
}
_ORDERED = (aten.contiguous.default, aten.to.dtype, aten.to.dtype_layout, aten.to.other, aten.to.device,
            aten.to.prim_Device, aten.to.prim_dtype, aten.to.prim_other)  # fmt: skip


class NotedOrders(TorchFunctionMode):
    """Around a forward that torch.export follows: let it note what gives tensors an order in memory."""

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, usual = kwargs or {}, _USUAL.get(func)
        if usual is None or kwargs.get("memory_format", usual) is torch.preserve_format:  # nearly all
            return func(*args, **kwargs)
        from torch._subclasses.fake_tensor import FakeTensor

        if type(args[0]) is not FakeTensor or isinstance(args[0], nn.Parameter):
            return func(*args, **kwargs)  # of constants, and of tensors of classes that may have no aliases
        function = aten.contiguous.default if func is torch.Tensor.contiguous else func
        return function(aten.alias.default(args[0]), *args[1:], **kwargs)


def drop_aliases(graph: fx.Graph) -> None:
    """Take out the aliases that were made for this."""
    for node in graph.find_nodes(op="call_function", target=aten.alias.default):
        if all(user.target in _ORDERED for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
