"""Where nodes come from: torchao's quantizer finds layers and activations by the module or function that was exported.

torch.export notes that with strict=True only, and not on all nodes. Without it torchao goes by the module that a node
lies in: a mask that pruning multiplies weights by passes for a convolution there, and F.relu for nothing.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn
from torch.nn import functional

from zendnn_cffi.api.quantization.layers import kind

SOURCE = "source_fn_stack"  # torch.export's key in node.meta: the modules and functions that a node comes from
_SOURCES: dict[str, Any] = {
    "conv1d": nn.Conv1d,
    "conv2d": nn.Conv2d,
    "linear": nn.Linear,
    "relu": nn.ReLU,
    "relu_": nn.ReLU,
    "relu6": nn.ReLU6,
    "relu6_": nn.ReLU6,
    "leaky_relu": nn.LeakyReLU,
    "leaky_relu_": nn.LeakyReLU,
    "hardtanh": nn.Hardtanh,
    "hardtanh_": nn.Hardtanh,
    "hardswish": nn.Hardswish,
    "hardswish_": nn.Hardswish,
    "silu": nn.SiLU,
    "silu_": nn.SiLU,
    "tanh": nn.Tanh,
    "tanh_": nn.Tanh,
    "gelu": nn.GELU,
    "add": operator.add,
    "add_": operator.add,
}
_SEEN = (nn.Conv2d, functional.conv2d, nn.Linear, functional.linear)  # those that the quantizer looks for
_KINDS = ("conv2d", "linear")


def name_sources(exported: fx.GraphModule) -> None:
    """Give each node that has no source one, in place, and one of its own where its module's would be mistaken."""
    for node in exported.graph.nodes:
        if node.op != "call_function":
            continue
        stack = node.meta.get(SOURCE)
        if not stack:
            node.meta[SOURCE] = [(node.name, _SOURCES.get(kind(node), node.target))]
        elif stack[-1][1] in _SEEN and kind(node) not in _KINDS:
            node.meta[SOURCE] = [*stack[:-1], (node.name, node.target)]
