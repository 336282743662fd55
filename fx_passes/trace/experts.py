"""Products of experts: let PyTorch's own operator compute what Transformers computes in a loop where it is traced.

Before: transformers.grouped_mm_fallback(rows, weights, offs)      rows [S, K] sorted by expert, weights [E, K, N]
After:  aten._grouped_mm(rows, weights, offs)

Transformers calls PyTorch's operator in eager mode, and where it is traced and weights are bf16. Inductor has none of
other dtypes, so a custom operator does it there, whose call alone takes 40 us. Both give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.torch_version import TorchVersion

_FALLBACKS = ("transformers.grouped_mm_fallback", "transformers.grouped_mm_fallback.default")  # perhaps not imported
_SINCE = "2.11"  # before, PyTorch's operator raises for tensors whose addresses are no multiples of 16
_ALIGNED_BYTES = 16  # PyTorch's operator wants distances that are multiples of it


def call_grouped_products(graph: fx.Graph) -> None:
    """Replace each such call of float32 tensors whose rows PyTorch's operator takes."""
    operator = getattr(torch.ops.aten, "_grouped_mm", None)
    if operator is None or TorchVersion(torch.__version__) < _SINCE:
        return
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target) in _FALLBACKS and _is_taken(node):
            names = ("input", "weight", "offs")
            given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            node.target, node.args, node.kwargs = operator.default, tuple(given[name] for name in names), {}


def _is_taken(node: fx.Node) -> bool:
    values = [source.meta.get("val") for source in node.all_input_nodes[:2]]
    if len(values) != 2 or not all(isinstance(value, torch.Tensor) for value in values):
        return False
    rows, weights = values
    if (rows.ndim, weights.ndim) != (2, 3) or {rows.dtype, weights.dtype} != {torch.float32}:
        return False
    if {rows.device.type, weights.device.type} != {"cpu"}:
        return False
    sizes = weights.shape[1:]
    aligned = all(isinstance(size, int) and size * rows.element_size() % _ALIGNED_BYTES == 0 for size in sizes)
    dense = [tuple(weights.stride()[1:]) == strides for strides in ((sizes[1], 1), (1, sizes[0]))]
    return aligned and any(dense) and rows.stride()[-1] == 1
