"""Arguments and results as the generated code takes and returns them.

torch.export leaves code that flattens its arguments and puts its results together by torch's pytree, at each call:

Before: x, y, = tree_flatten_spec(([x, y], {}), self._in_spec); ...; return tree_unflatten((a, b), self._out_spec)
After:  ...; return {"a": a, "b": b}
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from fx_passes.graph.graph import finish
from fx_passes.graph.structure_code import is_of_displays


def write_out_structure(gm: fx.GraphModule) -> fx.GraphModule:
    """Do without pytree where every argument is a value, and results lie in tuples, lists and dictionaries only."""
    info = getattr(gm.graph._codegen, "pytree_info", None)
    if info is None or info.out_spec is None:
        return gm
    names = [name for name in info.orig_args if name != "self"]
    placeholders = gm.graph.find_nodes(op="placeholder")
    output = next(iter(gm.graph.find_nodes(op="output")))
    if not is_of_displays(info.out_spec):
        return gm
    result = pytree.tree_unflatten(list(output.args[0]), info.out_spec)
    if not (_takes_values(info.in_spec) and _is_plain(result)):
        return gm
    if len(names) != len(placeholders) or not all(name.isidentifier() for name in names):
        return gm
    for node, name in zip(placeholders, names, strict=True):
        node.target = name
    output.args = (result,)
    gm.graph.set_codegen(fx.graph.CodeGen())
    return finish(gm)


def _takes_values(spec: Any) -> bool:
    """Whether a call's arguments, ((...), {...}), are tensors or numbers, each of them."""
    if spec.type is not tuple or len(spec.children()) != 2:
        return False
    return all(child.is_leaf() for arguments in spec.children() for child in arguments.children())


def _is_plain(value: Any) -> bool:
    """Whether value is made of what Python's own displays make."""
    if isinstance(value, fx.Node):
        return True
    if type(value) is dict:
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
