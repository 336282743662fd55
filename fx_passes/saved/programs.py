"""What was chosen for a region, as JSON; and the program made of it again, without choosing or measuring.

A candidate of primitives and AOCL-BLIS's products is written as what it is. One that calls PyTorch is found again by
its rule (fx_passes.saved.by_rule).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

from fx_passes.candidates.candidates import (
    Argument,
    Candidate,
    GemmTemplate,
    Operand,
    Operation,
    PrimitiveTemplate,
    Result,
    Scratchpad,
    Template,
    Temporary,
    Weights,
    arguments_of,
    weights_of,
)
from fx_passes.candidates.layouts import row_major
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.lower.context import strides_offered, torch_operation
from fx_passes.plan.prepack import WeightStore
from fx_passes.plan.schedule import build_program
from fx_passes.region.lowered import LoweredRegion, Lowering, NodeReport, boundary
from fx_passes.region.options import RegionOptions
from fx_passes.saved.encoding import decode, encode
from fx_passes.saved.errors import FileError
from fx_passes.saved.graphs import decode_graph, encode_graph
from fx_passes.saved.layouts import Layouts, NoForm, decode_descriptor, encode_descriptor
from zendnn_cffi.primitives.attributes import ARG_ATTR_ZERO_POINTS
from zendnn_cffi.primitives.lpgemm import Gemm, GemmPostOp
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.primitives.verification.unchecked import unchecked
from zendnn_cffi.values import dataclass

if TYPE_CHECKING:
    from fx_passes.saved.by_rule import Rules

_NOWHERE = torch.empty(0, dtype=torch.float32, device="cpu")  # what packed weights were made of is not looked at again


@dataclass(frozen=True)
class Context:
    """What is needed to make a program of what was chosen."""

    parameters: Mapping[str, torch.Tensor]
    weights: WeightStore
    options: RegionOptions


class Origin(Protocol):
    """Where the numbers of packed weights come from."""

    def __call__(self, key: str, desc: MemoryDesc, transposed: bool) -> Weights:
        """Return the constant of that key as a call reads it."""


def packed_before(key: str, desc: MemoryDesc, transposed: bool) -> Weights:
    """Weights that the store was given: what they were made of is not looked at again."""
    return Weights(key, _NOWHERE, desc, transposed=transposed)


def encode_program(
    lowered: LoweredRegion,
    layouts: Layouts,
    graph: fx.Graph | None = None,
    has_origin: Callable[[Weights], bool] = lambda _: True,
) -> dict[str, Any]:
    """What was chosen for one signature.

    graph       a graph that whoever reads this has: it is not written where lowering left it as it was
    has_origin  whether weights can be had again by their key; else the operation's rule makes them
    """
    assert lowered.lowering is not None
    lowering = lowered.lowering
    by_node = {operation.node: operation for operation in lowering.operations}

    def offered(node: fx.Node) -> list[Any]:
        return list(map(list, lowering.offered.get(node) or strides_offered(by_node[node])))

    operations = []
    for operation, candidate in zip(by_node.values(), lowering.choice, strict=True):
        read = [node for node in operation.operands if node in by_node]
        is_plain = all(map(has_origin, weights_of(candidate)))
        operations.append(_encode_operation(operation, candidate, layouts, read, offered, is_plain))
    is_known = graph is not None and str(graph) == str(lowering.graph)
    return {
        "graph": None if is_known else encode_graph(lowering.graph),
        "operations": operations,
        "reports": [asdict(report) for report in lowered.nodes],
        "alone_ns": lowered.alone_ns,
        "is_measured": lowered.is_measured,
    }


def packed_weights(lowering: Lowering) -> Iterable[Weights]:
    """The constants that its calls read."""
    for candidate in lowering.choice:
        yield from weights_of(candidate)


@unchecked()  # what was saved was compared with plain PyTorch, by the same library on the same kind of CPU
def decode_program(
    data: Mapping[str, Any],
    inputs: Sequence[TensorSpec],
    context: Context,
    layouts: Layouts,
    keep: bool = False,
    graph: fx.Graph | None = None,
    origin: Callable[[RegionValues], Origin] = lambda _: packed_before,
) -> LoweredRegion:
    """The program for these inputs. Raises FileError, and whatever descriptors raise, where it does not fit.

    graph   as encode_program was given
    origin  where weights come from that the store does not have
    """
    if graph is None or data["graph"] is not None:
        graph = decode_graph(data["graph"])
    elif any("rule" in row for row in data["operations"]):
        graph = copy.deepcopy(graph)  # rules may edit it
    options = context.options
    values = RegionValues(graph, inputs, context.parameters)
    weights = origin(values)
    nodes = {node.name: node for node in graph.nodes}
    computed = {row["node"] for row in data["operations"]}
    is_all = all(node.op != "call_function" or node.name in computed for node in values.specs)
    operations: dict[fx.Node, Operation] = {}
    covering, rules = {}, None
    if not is_all:
        from fx_passes.lower.products.gated_rows import cover_gated_rows

        covering = cover_gated_rows(graph, values)
    if any("rule" in row for row in data["operations"]):
        from fx_passes.saved.by_rule import Rules

        rules = Rules(graph, values, options, operations, covering)
    choice = []
    for row in data["operations"]:
        operation, candidate = _decode_operation(row, nodes, values, rules, layouts, weights)
        operations[operation.node] = operation
        choice.append(candidate)
    program = build_program([*operations.values()], choice, *boundary(graph, values), context.weights)
    reports = tuple(NodeReport(**{**row, "post_ops": tuple(row["post_ops"])}) for row in data["reports"])
    lowering = Lowering(graph, [*operations.values()], choice, {} if rules is None else rules.offered) if keep else None
    return LoweredRegion(
        program, reports, data["alone_ns"], data["is_measured"], inputs=tuple(inputs), lowering=lowering
    )


def _encode_operation(
    operation: Operation,
    candidate: Candidate,
    layouts: Layouts,
    read: Sequence[fx.Node],
    offered: Callable[[fx.Node], list[Any]],
    is_plain: bool,
) -> dict[str, Any]:
    row: dict[str, Any] = {"node": operation.node.name}
    if operation.fallback_reason:
        return {**row, "torch": operation.fallback_reason}
    try:
        if candidate.guard is not None or not is_plain:  # a function
            raise NoForm
        return {
            **row,
            "name": operation.name,
            "kind": operation.kind,
            "operands": [node.name for node in operation.operands],
            "flops": operation.flops,
            "implementation": candidate.implementation,
            "srcs": [layouts.place(desc) for desc in candidate.srcs],
            "dst": layouts.place(candidate.dst),
            "calls": [_encode_call(template, layouts) for template in candidate.calls],
            "overwrites": candidate.overwrites,
            "may_overwrite": candidate.may_overwrite,
            "slices_bytes": list(candidate.slices_bytes),
            "offset_bytes": candidate.offset_bytes,
            "cost_ns": candidate.cost_ns,
        }
    except NoForm:
        from fx_passes.saved.by_rule import identity

        return {**row, "rule": identity(candidate), "offered": {node.name: offered(node) for node in read}}


def _decode_operation(
    row: Mapping[str, Any],
    nodes: Mapping[str, fx.Node],
    values: RegionValues,
    rules: Rules | None,
    layouts: Layouts,
    weights: Origin,
) -> tuple[Operation, Candidate]:
    node = nodes[row["node"]]
    spec = values.specs[node]
    if "torch" in row:
        operation = torch_operation(node, values, row["torch"])
        return operation, operation.candidates[0]
    if "rule" in row:
        assert rules is not None
        offered = {nodes[name]: list(map(tuple, strides)) for name, strides in row.get("offered", {}).items()}
        return rules.find(node, row["rule"], offered)
    srcs = tuple(layouts.at(place) for place in row["srcs"])
    candidate = Candidate(
        row["implementation"],
        srcs,
        layouts.at(row["dst"]),
        tuple(_decode_call(call, layouts, weights) for call in row["calls"]),
        overwrites=row["overwrites"],
        may_overwrite=row["may_overwrite"],
        slices_bytes=tuple(row["slices_bytes"]),
        cost_ns=row["cost_ns"],
        offset_bytes=row["offset_bytes"],
    )
    operands = tuple(nodes[name] for name in row["operands"])
    _check(candidate, len(operands), node.name)
    return Operation(node, row["name"], row["kind"], operands, spec, [candidate], row["flops"]), candidate


def _encode_call(template: Template, layouts: Layouts) -> list[Any]:
    match template:
        case PrimitiveTemplate(pd, args, kind, flops):
            if args.keys() - _expected(pd).keys():  # operands whose size the library does not tell
                raise NoForm
            arguments = [[number, _encode_argument(argument, pd, layouts)] for number, argument in args.items()]
            return ["primitive", encode_descriptor(pd, layouts), arguments, kind, flops]
        case GemmTemplate(gemm, src, weights, dst, operands):
            parts = [_encode_argument(part, None, layouts) for part in (src, weights, dst, *operands)]
            post_ops = tuple((p.kind, p.numbers, p.operand) for p in gemm.post_ops)
            return ["gemm", encode((gemm.sizes, gemm.dtype, gemm.result, post_ops), layouts.special), parts]
    raise NoForm


def _decode_call(data: Any, layouts: Layouts, origin: Origin) -> Template:
    if data[0] == "primitive":
        pd = decode_descriptor(data[1], layouts)
        args = {number: _decode_argument(argument, pd, layouts, origin) for number, argument in data[2]}
        return PrimitiveTemplate(pd, args, data[3], data[4])
    if data[0] == "gemm":
        sizes, dtype, result, post_ops = decode(data[1], layouts.special_back)
        gemm = Gemm(sizes, dtype, result, tuple(GemmPostOp(*post_op) for post_op in post_ops))
        src, weights, dst, *operands = (_decode_argument(part, None, layouts, origin) for part in data[2])
        if isinstance(weights, Weights) and weights.desc == gemm.weights:
            return GemmTemplate(gemm, src, weights, dst, tuple(operands))
    raise FileError(f"no call is written as {str(data)[:80]}")


def _encode_argument(argument: Argument, pd: PrimitiveDesc | None, layouts: Layouts) -> list[Any]:
    def place(desc: Any) -> int | str | None:
        if pd is not None and desc == pd.weights_desc:
            return "weights"  # as the implementation chooses
        return None if desc is None else layouts.place(desc)

    match argument:
        case Operand(index, desc, offset_bytes):
            return ["operand", index, place(desc), offset_bytes]
        case Result(desc, offset_bytes):
            return ["result", place(desc), offset_bytes]
        case Temporary(index, desc, offset_bytes):
            return ["temporary", index, place(desc), offset_bytes]
        case Weights(key, desc=desc, transposed=transposed):
            return ["weights", key, place(desc), transposed]
        case Scratchpad():
            return ["scratchpad"]


def _decode_argument(data: Any, pd: PrimitiveDesc | None, layouts: Layouts, origin: Origin) -> Argument:
    def desc(place: Any) -> Any:
        if place == "weights" and pd is not None:
            return pd.weights_desc
        return None if place is None else layouts.at(place)

    match data:
        case ["operand", int(index), place, int(offset_bytes)] if offset_bytes >= 0:
            return Operand(index, desc(place), offset_bytes)
        case ["result", place, int(offset_bytes)] if offset_bytes >= 0:
            return Result(desc(place), offset_bytes)
        case ["temporary", int(index), place, int(offset_bytes)] if place is not None and offset_bytes >= 0:
            return Temporary(index, desc(place), offset_bytes)
        case ["weights", str(key), place, bool(transposed)] if place is not None:
            return origin(key, desc(place), transposed)
        case ["scratchpad"] if pd is not None and pd.scratchpad_desc is not None:
            return Scratchpad(pd.scratchpad_desc)
    raise FileError(f"no argument is written as {str(data)[:80]}")


def _check(candidate: Candidate, operands: int, name: str) -> None:
    """Refuse what would reach beyond its memory: the library does not look."""
    srcs = [desc.size_bytes for desc in candidate.srcs]
    if len(srcs) != operands or any(index not in range(operands) for index in _overwritten(candidate)):
        raise FileError(f"{name} has {operands} operands")
    if candidate.is_view and not (operands and 0 <= candidate.offset_bytes <= srcs[0] - candidate.dst.size_bytes):
        raise FileError(f"{name} is seen beyond what it is a part of")
    if candidate.overwrites is not None and srcs[candidate.overwrites] < candidate.dst.size_bytes:
        raise FileError(f"{name} does not fit where it is written")
    pieces = candidate.slices_bytes
    if pieces and not (len(pieces) == len(candidate.calls) == operands):
        raise FileError(f"{name} has no such pieces")
    for offset_bytes, size in zip(pieces, srcs, strict=False):
        if not 0 <= offset_bytes <= candidate.dst.size_bytes - size:
            raise FileError(f"{name} has a piece beyond its end")
    for template in candidate.calls:
        for argument in arguments_of(template):
            _check_reach(argument, srcs, candidate.dst.size_bytes, name)
        if isinstance(template, PrimitiveTemplate):
            _check_primitive(template, candidate, name)
        elif isinstance(template, GemmTemplate):
            _check_product(template, candidate, name)


def _overwritten(candidate: Candidate) -> list[int]:
    return [index for index in (candidate.overwrites, candidate.may_overwrite) if index is not None]


def _check_reach(argument: Argument, srcs: Sequence[int], dst: int, name: str) -> None:
    if isinstance(argument, Operand):
        if argument.index not in range(len(srcs)):
            raise FileError(f"{name} reads operand {argument.index}")
        whole = srcs[argument.index]
    elif isinstance(argument, Result):
        whole = dst
    else:
        return
    if argument.offset_bytes + (whole if argument.desc is None else argument.desc.size_bytes) > whole:
        raise FileError(f"{name} reaches beyond {argument}")


def _check_primitive(template: PrimitiveTemplate, candidate: Candidate, name: str) -> None:
    expected = _expected(template.pd)
    if missing := expected.keys() - template.args.keys():
        raise FileError(f"{name} lacks the arguments {sorted(missing)}")
    for number, argument in template.args.items():
        wanted = expected.get(number)
        if wanted is None or wanted.size_bytes > _seen_bytes(argument, candidate):
            raise FileError(f"{name}: argument {number} is not the one that {template.pd} reads")


def _expected(pd: PrimitiveDesc) -> dict[int, MemoryDesc]:
    """What pd reads and writes: what the library tells, and zero points."""
    given = (arg for arg in pd.attr.runtime_args if arg & ARG_ATTR_ZERO_POINTS)
    return {**pd.expected_args, **{arg: row_major((1,), torch.int32) for arg in given}}


def _check_product(template: GemmTemplate, candidate: Candidate, name: str) -> None:
    gemm = template.gemm
    m, k, n = gemm.sizes
    read = [p.operand.itemsize * (n if p.kind == "bias" else m * n) for p in gemm.post_ops if p.operand is not None]
    wanted = [m * k * gemm.dtype.itemsize, gemm.weights.size_bytes, m * n * gemm.result.itemsize, *read]
    seen = [_seen_bytes(argument, candidate) for argument in template.args]
    if min(m, k, n) < 1 or len(seen) != len(wanted) or any(a < b for a, b in zip(seen, wanted, strict=True)):
        raise FileError(f"{name}: the operands are not those that {gemm} reads")


def _seen_bytes(argument: Argument, candidate: Candidate) -> int:
    """How much memory an argument stands for."""
    if argument.desc is not None:
        return int(argument.desc.size_bytes)
    return int((candidate.srcs[argument.index] if isinstance(argument, Operand) else candidate.dst).size_bytes)
