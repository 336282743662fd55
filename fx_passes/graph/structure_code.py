"""Code that takes arguments apart and puts results together by Python's own means, where PyTorch's pytree would.

    x, cos, sin, = fx_pytree.tree_flatten_spec(([x], {"rope": rope}), self._in_spec)     25 us (Zen 3)
    x, cos, sin, = x, rope[0], rope[1]                                                   0.1 us

The structure of a call is that of the spec: guards compared it. Containers of other classes are pytree's to take apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree


class StructureCode(_PyTreeCodeGen):
    """Of a graph whose codegen has this pytree_info."""

    def gen_var_bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        """The lines that follow the signature: free_vars are the arguments one by one."""
        found = paths_of_arguments(self.pytree_info.orig_args, self.pytree_info.in_spec)
        names = [name.split(":")[0].split("#")[0].strip() for name in free_vars if name != "self"]
        if found is None or len(found) != len(names):
            code: str = super().gen_var_bindings(fn_args, free_vars, expanded_def)
            return code
        pairs = [(name, path) for name, path in zip(names, found, strict=True) if name != path]
        if not pairs:
            return ""
        return f"\n    {', '.join(name for name, _ in pairs)}, = {', '.join(path for _, path in pairs)},"

    def generate_output(self, output_args: Any, **options: Any) -> str:
        """The line of the return statement."""
        spec = self.pytree_info.out_spec
        if spec is None or not is_of_displays(spec) or options.get("descs") is not None:
            code: str = super().generate_output(output_args, **options)
            return code
        write = options.get("repr_fn") or repr
        return f"return {write(pytree.tree_unflatten(list(output_args), spec))}"


def with_structure_code(graph: fx.Graph) -> bool:
    """Let a graph whose code would call pytree do without, where it can; whether its codegen is another now."""
    if type(graph._codegen) is not _PyTreeCodeGen or graph._codegen.pytree_info is None:
        return False
    graph.set_codegen(StructureCode(graph._codegen.pytree_info))
    return True


def paths_of_arguments(names: Sequence[str], spec: Any) -> list[str] | None:
    """An expression for each value in the arguments of these names; None where a container is none of Python's own."""
    names = [name for name in names if name != "self"]
    if spec is None or spec.type is not tuple or not is_of_displays(spec):
        return None
    children = spec.children()
    if len(children) == 2 and children[0].type is tuple and children[1].type is dict:
        children = [child for arguments in children for child in arguments.children()]
    if len(children) != len(names) or not all(map(str.isidentifier, names)):
        return None
    return [path for name, child in zip(names, children, strict=True) for path in _paths(name, child)]


def _paths(path: str, spec: Any) -> Iterator[str]:
    if spec.is_leaf():
        yield path
        return
    keys = spec.context if spec.type is dict else range(len(spec.children()))
    for key, child in zip(keys, spec.children(), strict=True):
        yield from _paths(f"{path}[{key!r}]", child)


def is_of_displays(spec: Any) -> bool:
    """Whether containers are Python's own, with keys of text: others may compute something of what they are made of."""
    if spec.is_leaf():
        return True
    if spec.type is dict and not all(type(key) is str for key in spec.context):
        return False
    return spec.type in (tuple, list, dict) and all(map(is_of_displays, spec.children()))
