"""Plain PyTorch as one more candidate for operations that its own kernels compute well.

Measured beside the primitives, in row-major and channels-last layouts; where PyTorch has a function with `out`, it
writes straight into the arena. Of what has weights, that is so for transposed convolutions and for linear layers of one
row in float16, and without AVX-512 for all: PyTorch's own kernels for them are newer than the library's, and faster for
some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.candidates import Argument, Candidate, Operand, Operation, Result, TorchTemplate
from fx_passes.candidates.layouts import channels_of_a_block, has_avx512, layout, row_major, spatial_tags
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.post_ops import as_of_floats
from fx_passes.lower.torch_into import BINARY_INTO, Into, eltwise_into, post_ops_into

aten = torch.ops.aten

RIVALS = ops.having(torch_candidate=True)
WEIGHTED = ops.having(weighted=True)


def add_rivals(operation: Operation, node: fx.Node, context: LoweringContext) -> None:
    """Append candidates in which PyTorch computes node, to an operation that primitives can compute too."""
    if not _has_rivals(node, context) or operation.fallback_reason or operation.kind == "view":
        return
    if any(candidate.implementation == "torch" for candidate in operation.candidates):  # its own are as good
        return
    specs = [context.values.specs[n] for n in operation.operands]
    try:
        dtypes = [context.dtype(spec) for spec in (*specs, operation.spec)]
    except NotLowered:
        return
    if dtypes[-1] != operation.spec.dtype and context.values.constants_of(node):  # they are of the other dtype
        if node.target in WEIGHTED and not _is_one_row(node, operation.spec):
            return
        if operation.spec.dtype.itemsize == 2:  # layer_norm and the like take no constants of it beside float32
            dtypes = [spec.dtype for spec in (*specs, operation.spec)]
    function, into = _function(operation, node, context)
    for channels_last in (False, True):
        if channels_last and (operation.spec.ndim not in (4, 5) or any(s.ndim != operation.spec.ndim for s in specs)):
            continue
        descs = [_desc(s, d, channels_last) for s, d in zip((*specs, operation.spec), dtypes, strict=True)]
        key = f"{torch.__version__} {_described(node, context)} {into}"
        template = TorchTemplate(function, "", into, key)
        operation.candidates.append(Candidate("torch", tuple(descs[:-1]), descs[-1], (template,)))
    if node.target is ops.concat:
        operation.candidates += _concat_of_blocks(operation, node, context)


def _is_one_row(node: fx.Node, spec: TensorSpec) -> bool:
    """Whether it is a linear layer of one row in 16 bits, which PyTorch's kernel reads as it lies: half the memory."""
    return node.target is ops.linear and spec.dtype.itemsize == 2 and spec.numel == spec.shape[-1]


def _has_rivals(node: fx.Node, context: LoweringContext) -> bool:
    if node.target not in WEIGHTED:
        return node.target in RIVALS
    if isinstance(context.values.arguments(node)["weight"], fx.Node):  # computed at run time: gates, attention
        return False
    spec = context.values.specs[node]
    is_narrow_row = _is_one_row(node, spec) and context.dtype(spec) != spec.dtype
    return node.target in RIVALS or is_narrow_row or not has_avx512()


def _concat_of_blocks(operation: Operation, node: fx.Node, context: LoweringContext) -> Iterator[Candidate]:
    """Channels joined in blocks: of each sample's row of blocks, the pieces' rows one after another."""
    arguments, spec = context.values.arguments(node), operation.spec
    specs = [context.values.specs[n] for n in operation.operands]
    if (
        spec.ndim not in (4, 5)
        or arguments["dim"] % spec.ndim != 1
        or any(s.shape[1] % channels_of_a_block() for s in specs)
    ):
        return
    dtype, tag = context.dtype(spec), spatial_tags(spec.ndim)[1]
    descs = [layout(s.shape, dtype, tag) for s in (*specs, spec)]
    rows = [row_major((s.shape[0], s.numel // s.shape[0]), dtype) for s in (*specs, spec)]
    args: tuple[Argument, ...] = (*(Operand(index, row) for index, row in enumerate(rows[:-1])), Result(rows[-1]))
    key = f"{torch.__version__} {_described(node, context)} blocks"
    template = TorchTemplate(lambda *xs: torch.cat(xs[:-1], 1, out=xs[-1]), "", True, key, args)
    yield Candidate("torch", tuple(descs[:-1]), descs[-1], (template,))


def _desc(spec: TensorSpec, dtype: torch.dtype, channels_last: bool) -> Any:
    if channels_last:
        return layout(spec.shape, dtype, spatial_tags(spec.ndim)[0])
    return row_major(spec.shape or (1,), dtype)


def _function(operation: Operation, node: fx.Node, context: LoweringContext) -> tuple[Into, bool]:
    """The computation, and whether it writes its result itself."""
    operands, arguments = operation.operands, context.values.arguments(node)
    if node.target in WEIGHTED and arguments["post_ops"]:
        return _with_post_ops(node, context.values.given(node, operands)), True
    writing = _writing(node, arguments, operands)
    if writing is not None and len(set(operands)) == len(operands):
        return writing, True
    return context.values.computation(node, operands), False


def _with_post_ops(node: fx.Node, given: Callable[..., tuple[Any, Any]]) -> Into:
    """function(*operands, result): the last post-op writes, and none before it makes a tensor."""

    def compute(*tensors: torch.Tensor) -> Any:
        args, kwargs = given(*tensors[:-1])
        post_ops = kwargs["post_ops"]
        return post_ops_into(node.target(*args, **{**kwargs, "post_ops": ()}), post_ops, tensors[-1])

    return compute


def _writing(node: fx.Node, arguments: dict[str, Any], operands: tuple[fx.Node, ...]) -> Into | None:
    """function(*operands, result) where PyTorch has one with `out`."""
    match node.target:
        case ops.eltwise:
            return eltwise_into(arguments["kind"], arguments["alpha"], arguments["beta"])
        case ops.binary if arguments["kind"] in BINARY_INTO:
            return _binary(BINARY_INTO[arguments["kind"]], arguments["a"], arguments["b"], operands)
        case ops.softmax:
            function = aten._log_softmax.out if arguments["log"] else aten._softmax.out
            return lambda x, out: function(x, arguments["dim"], False, out=out)
        case ops.concat if tuple(arguments["srcs"]) == operands:
            return lambda *xs: torch.cat(xs[:-1], arguments["dim"], out=xs[-1])
    return None


def _binary(function: Into, a: Any, b: Any, operands: tuple[fx.Node, ...]) -> Into | None:
    if (a, b) == operands:
        return lambda x, y, out: function(x, y, out=out)
    if (b, a) == operands:
        return lambda y, x, out: function(x, y, out=out)
    if isinstance(b, torch.Tensor) and (a,) == operands:
        return lambda x, out: function(x, b, out=out)
    return None


def _described(node: fx.Node, context: LoweringContext) -> str:
    """A text that is equal for equal work: the operation and its arguments, tensors by shape and dtype."""

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return str(context.values.specs.get(value, "?"))
        if isinstance(value, torch.Tensor):
            return f"constant {tuple(value.shape)} {value.dtype}"
        if isinstance(value, dict):
            return str({k: text(v) for k, v in value.items()})
        if isinstance(value, tuple | list):
            return str([text(v) for v in value])
        return repr(value)

    return as_of_floats(f"{node.target.__name__} {text(context.values.arguments(node))}")
