"""What the report calls layers: by their modules, and by their weights where one module has several.

    encoder.mlp, encoder.mlp                     x @ self.up ... @ self.down in one forward
    encoder.mlp.up, encoder.mlp.down

Calls of one layer are numbered. Weights lose their names on the way, so they are noted once a graph is exported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import fx

from zendnn_cffi.api.quantization.layers import kind, module_path

_WEIGHT = "quantized_weight"  # our key in node.meta: the name of the parameter that a layer multiplies by
_OPERAND = {"addmm": 2, "baddbmm": 2}  # which argument that is, if not the second
_LAYERS = ("conv1d", "conv2d", "conv3d", "linear", "matmul", "mm", "bmm", *_OPERAND)


def note_weights(exported: fx.GraphModule) -> None:
    """Note on each layer which parameter it multiplies by, in place."""
    for node in exported.graph.nodes:
        if node.op != "call_function" or kind(node) not in _LAYERS:
            continue
        weight = node.args[_OPERAND.get(kind(node), 1)]
        while isinstance(weight, fx.Node) and weight.op != "get_attr" and len(weight.all_input_nodes) == 1:
            weight = weight.all_input_nodes[0]
        if isinstance(weight, fx.Node) and weight.op == "get_attr":
            node.meta[_WEIGHT] = str(weight.target)


def places(layers: Iterable[fx.Node]) -> dict[str, str]:
    """A name of its own for each layer, by its node's name."""
    found = {node: module_path(node) for node in layers}
    for naming in (_of_weight, _numbered):
        shared = Counter(found.values())
        again = {node: naming(node, place, found) for node, place in found.items() if not place or shared[place] > 1}
        found |= again
    return {node.name: place for node, place in found.items()}


def _of_weight(node: fx.Node, place: str, found: dict[fx.Node, str]) -> str:
    return str(node.meta.get(_WEIGHT, place)).removesuffix(".weight") or node.name


def _numbered(node: fx.Node, place: str, found: dict[fx.Node, str]) -> str:
    alike = [other for other, name in found.items() if name == place]
    return f"{place} (call {alike.index(node) + 1})"
