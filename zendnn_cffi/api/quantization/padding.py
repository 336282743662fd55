"""Padding of convolutions, written out: torchao's quantizer raises for what else nn.Conv2d does than aten.conv2d.

conv2d(x, w, b, 1, "same")                    conv2d(constant_pad_nd(x, ...), w, b, 1, ...)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes.graph.graph import get_attribute
from zendnn_cffi.api.quantization.sources import SOURCE

_WITH_TEXT = {
    torch.ops.aten.conv1d.padding: torch.ops.aten.conv1d.default,
    torch.ops.aten.conv2d.padding: torch.ops.aten.conv2d.default,
    torch.ops.aten.conv3d.padding: torch.ops.aten.conv3d.default,
}


def write_out_padding(exported: fx.GraphModule) -> None:
    """Let convolutions have numbers as padding."""
    for node in list(exported.graph.nodes):
        if node.op == "call_function" and node.target in _WITH_TEXT:
            _with_numbers(exported, node)
    exported.recompile()


def _with_numbers(exported: fx.GraphModule, node: fx.Node) -> None:
    defaults: tuple[Any, ...] = (None, None, None, 1, "valid", 1, 1)
    src, weight, bias, stride, padding, dilation, groups = tuple(node.args) + defaults[len(node.args) :]
    if node.kwargs or padding not in ("same", "valid"):
        return
    shape = get_attribute(exported, weight.target).shape if weight.op == "get_attr" else weight.meta["val"].shape
    dims = len(shape) - 2
    strides, dilations = _for_each(stride, dims), _for_each(dilation, dims)
    totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilations, shape[2:], strict=True)]
    if any(total % 2 for total in totals):
        pads = [n for total in reversed(totals) for n in (0, total % 2)]  # PyTorch adds the odd one behind
        with exported.graph.inserting_before(node):
            padded = exported.graph.call_function(torch.ops.aten.constant_pad_nd.default, (src, pads))
        padded.meta = {name: note for name, note in node.meta.items() if name == "nn_module_stack"}
        padded.meta[SOURCE] = [(padded.name, padded.target)]
        padded.meta["val"] = torch.ops.aten.constant_pad_nd.default(src.meta["val"], pads)
        src = padded
    node.target = _WITH_TEXT[node.target]
    node.args = (src, weight, bias, strides, [total // 2 for total in totals], dilations, groups)


def _for_each(numbers: Any, dims: int) -> list[int]:
    """A number for each dimension, where one stands for all."""
    numbers = list(numbers) if isinstance(numbers, list | tuple) else [numbers]
    return numbers * (dims if len(numbers) == 1 else 1)
