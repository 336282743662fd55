"""Two networks that have most of what regions compute, one of images, one of rows; and a linear layer by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fx_passes import ops
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.rules import lower_graph
from tests.support.lowering import net, noise


def images() -> tuple[nn.Module, Tensor]:
    """Convolutions with a residual sum, a mean and a linear layer; and its input."""

    def fn(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m[0](x))
        return m[3]((F.relu(m[1](y)) + m[2](y)).mean((2, 3)))

    layers = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1), nn.Linear(16, 10)
    return net(fn, *layers), noise(2, 3, 12, 11)


def rows() -> tuple[nn.Module, Tensor]:
    """A normalization, attention and linear layers; and its input."""

    def fn(m: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in m[0](m[1](x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return m[2](F.gelu(y) + x)

    return net(fn, nn.Linear(64, 192), nn.LayerNorm(64), nn.Linear(64, 48)), noise(2, 9, 64)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"images": images, "rows": rows}


def linear_by_torch(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.dtype | None]:
    """In which dtypes PyTorch's own product is a candidate for a linear layer of 64 features of inputs [*shape]."""
    graph = fx.Graph()
    graph.output(graph.call_function(ops.linear, (graph.placeholder("x"), graph.get_attr("w"))))
    spec = TensorSpec.of(torch.empty(shape, dtype=dtype))
    (operation,), _ = lower_graph(graph, [spec], {"w": noise(48, 64, dtype=dtype)})
    return [c.dst.dtype for c in operation.candidates if c.implementation == "torch"]
