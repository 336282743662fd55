"""The module tree of a loaded module: parameters and buffers under their names, in modules without a forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from fx_passes.graph.graph import get_attribute
from fx_passes.graph.inner import parts
from fx_passes.saved.container import by_alignment
from fx_passes.saved.encoding import decode, encode
from fx_passes.saved.errors import FileError, NotSaved
from fx_passes.saved.layers import decode_layer, encode_layer
from fx_passes.saved.memory import decode_memory, encode_memory
from fx_passes.saved.plain_run import PlainRun
from fx_passes.trace.traced import forward_signature


class Restored(nn.Module):
    """The root of a loaded module.

    saved_signature  that of the model's forward
    plain_run        computes the model as plain PyTorch, by the graphs that are given to it
    """

    saved_signature: inspect.Signature
    plain_run: PlainRun

    def __init__(self) -> None:
        super().__init__()
        self.plain_run = PlainRun()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model as plain PyTorch. Raises ValueError for arguments that the graph is not right for."""
        return self.plain_run(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Without the graphs: who copies the module gives it its own."""
        return {**self.__dict__, "plain_run": PlainRun()}


def encode_tree(root: nn.Module, graphs: list[fx.Graph]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what there is in the tree as JSON, and its tensors by name.

    A parameter that is made of others (torchao's Int8Tensor) becomes a module that has these as buffers.

    graphs  those that read tensors of it, which may be plain attributes, too
    Raises  NotSaved for tensors that a file does not hold
    """
    rows, tensors = _collected(root, graphs)
    called = {str(node.target) for graph in graphs for node in graph.find_nodes(op="call_module")}
    if layers := {name: encode_layer(root.get_submodule(name)) for name in sorted(called) if is_layer(root, name)}:
        rows["layers"] = layers
    return {**rows, **encode_memory(tensors), "signature": _encode_signature(root)}, by_alignment(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    )


def check_reads(root: nn.Module, graphs: list[fx.Graph]) -> None:
    """Raise NotSaved where these graphs read what a file does not hold."""
    _collected(root, graphs)


def _collected(root: nn.Module, graphs: list[fx.Graph]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What there is in the tree by name, and the tensors as they lie."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}

    def place(name: str, tensor: torch.Tensor | None) -> str | None:
        if tensor is None:
            return None
        if id(tensor) not in names:
            _check(name, tensor)
            names[id(tensor)] = name
            tensors[name] = tensor.resolve_conj().resolve_neg()
        return names[id(tensor)]

    modules, parameters, buffers, known, wrapped = [], [], [], set[str](), set[str]()
    for path, module in root.named_modules(remove_duplicate=False):  # graphs may name any path of a shared module
        modules.append(path)
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            known.add(prefix + name)
            made_of = {} if parameter is None else parts(parameter)
            if made_of and all(map(str.isidentifier, made_of)):
                wrapped.add(prefix + name)
                modules.append(prefix + name)
                for part, tensor in made_of.items():
                    known.add(below := f"{prefix}{name}.{part}")
                    buffers.append([below, place(below, tensor), True])
                continue
            wants = parameter is not None and parameter.requires_grad
            parameters.append([prefix + name, place(prefix + name, parameter), wants])
        for name, buffer in module._buffers.items():
            known.add(prefix + name)
            persistent = name not in module._non_persistent_buffers_set
            buffers.append([prefix + name, place(prefix + name, buffer), persistent])
    attributes = []
    for name in dict.fromkeys(str(node.target) for graph in graphs for node in graph.find_nodes(op="get_attr")):
        if name not in known or name in wrapped:
            value = get_attribute(root, name)
            if name in wrapped or not isinstance(value, torch.Tensor):
                raise NotSaved(f"its graph reads {name}, a {type(value).__name__}")
            attributes.append([name, place(name, value)])
    rows = {"modules": modules, "parameters": parameters, "buffers": buffers, "attributes": attributes}
    return rows, tensors


def _check(name: str, tensor: torch.Tensor) -> None:
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    if not plain or not tensor.is_cpu or tensor.is_quantized or tensor.is_nested:
        raise NotSaved(f"{name} is no dense tensor in memory")
    if name.startswith("zendnn_cffi."):
        raise NotSaved(f"{name} has a name that this package keeps for itself")


def decode_tree(data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Restored:
    """Return the tree that encode_tree wrote, over these tensors."""
    root = Restored()
    root.saved_signature = _decode_signature(data["signature"])
    layers = data.get("layers", {})
    for path in data["modules"]:
        if path:
            owner, _, name = path.rpartition(".")
            module = decode_layer(layers[path]) if path in layers else nn.Module()
            root.get_submodule(owner).add_module(name, module)
    tensors = {**tensors, **decode_memory(data, tensors)}
    made: dict[str, torch.Tensor] = {}
    for name, source, wants in data["parameters"]:
        if source is not None and source not in made:
            made[source] = nn.Parameter(tensors[source], requires_grad=wants)
        owner, _, last = name.rpartition(".")
        parameter: Any = None if source is None else made[source]
        root.get_submodule(owner).register_parameter(last, parameter)
    for name, source, persistent in data["buffers"]:
        if source is not None and source not in made:
            made[source] = tensors[source]
        owner, _, last = name.rpartition(".")
        buffer = None if source is None else made[source]
        root.get_submodule(owner).register_buffer(last, buffer, persistent=persistent)
    for name, source in data["attributes"]:
        if source not in made:
            made[source] = tensors[source]
        owner, _, last = name.rpartition(".")
        setattr(root.get_submodule(owner), last, made[source])
    root.eval()
    for path, (_, _, training) in layers.items():  # dropout at inference, say
        root.get_submodule(path).train(training is True)
    return root


def is_layer(root: nn.Module, path: str) -> bool:
    """Whether there is a module that can be called, and not only holds parameters."""
    try:
        return path != "" and type(root.get_submodule(path)) is not nn.Module
    except AttributeError:
        return False


def _encode_signature(root: nn.Module) -> list[Any]:
    rows = []
    for p in forward_signature(root).parameters.values():
        try:
            default = None if p.default is p.empty else [encode(p.default, lambda _: None)]
        except NotSaved:
            default = [None]
        rows.append([p.name, int(p.kind), default])
    return rows


def _decode_signature(rows: Any) -> inspect.Signature:
    def parameter(name: str, kind: int, default: Any) -> inspect.Parameter:
        given = inspect.Parameter.empty if default is None else decode(default[0], lambda _: None)
        return inspect.Parameter(name, inspect._ParameterKind(kind), default=given)

    try:
        return inspect.Signature([parameter(*row) for row in rows])
    except (TypeError, ValueError) as error:
        raise FileError(f"the signature in the file cannot be read ({error})") from error
