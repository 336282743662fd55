"""What the lowering rules of one region under one signature share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.candidates import Candidate, Operation, TorchTemplate, Weights
from fx_passes.candidates.layouts import (
    GrowingDesc,
    OpaqueDesc,
    computed_as,
    is_describable,
    is_known_dtype,
    row_major,
    strided,
)
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.graph.graph import signature_of
from fx_passes.lower.post_ops import BinaryPostOp, PostOp, append_post_ops, translate
from zendnn_cffi.primitives.checks import MAX_RANK
from zendnn_cffi.values import dataclass

MAX_LAYOUTS = 4  # of one value, that readers offer views of
PRIMITIVE_DTYPES = (torch.float32, torch.bfloat16)
CONSTANT_DTYPES = (*PRIMITIVE_DTYPES, torch.float16)  # packed as one of these
# Operations whose kernels let a weight that is not finite reach other elements than it should, or fewer.
SPREADING = frozenset({ops.convolution, ops.deconvolution, ops.batch_norm, ops.prelu})


class NotLowered(Exception):
    """No primitive takes this node: it runs as plain PyTorch. The text says why, for explain."""


class SplitPostOps(Exception):
    """The node's post-ops from index `keep` on cannot be absorbed: they become operations of their own."""

    def __init__(self, keep: int) -> None:
        super().__init__(keep)
        self.keep = keep


@dataclass
class LoweringContext:
    """Facts and choices that hold for the whole region.

    compute_dtype   dtype of activations and weights inside; None keeps each node's own
    overwritable    (reader, operand) -> whether reader is the last to read operand's memory and may write there
    allow_winograd  whether Winograd convolutions are candidates
    without         kinds of candidates that are not offered: their guards failed
    covering        node -> the one before it that its operation covers
    operations      what nodes before this one were lowered to
    offered         strides that the candidates of some of these had, where a file has the chosen ones alone
    """

    values: RegionValues
    compute_dtype: torch.dtype | None
    overwritable: Callable[[fx.Node, fx.Node], bool]
    allow_winograd: bool = True
    without: Sequence[str] = ()
    covering: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    operations: dict[fx.Node, Operation] = field(default_factory=dict)
    offered: dict[fx.Node, list[tuple[int, ...]]] = field(default_factory=dict)

    def plain_strides(self, node: fx.Node) -> list[tuple[int, ...]]:
        """Strides (elements) of the plain layouts that node may leave its value in, the likeliest first."""
        if node in self.offered:
            return self.offered[node]
        operation = self.operations.get(node)
        return [self.values.specs[node].strides] if operation is None else strides_offered(operation)

    def dtype(self, spec: TensorSpec) -> torch.dtype:
        """The dtype a value of this spec has inside the region; NotLowered where no primitive computes in it."""
        asked = self.compute_dtype if spec.dtype in (torch.float32, torch.float16) else None
        dtype = computed_as(asked or spec.dtype)
        if dtype not in PRIMITIVE_DTYPES:
            raise NotLowered(f"dtype {str(dtype).removeprefix('torch.')}: primitives compute in float32 and bfloat16")
        return dtype

    def tensor(self, node: Any, what: str) -> TensorSpec:
        """The spec of a run-time operand; NotLowered where it is not one."""
        if not isinstance(node, fx.Node) or node not in self.values.specs:
            raise NotLowered(f"{what} is not a tensor computed at run time")
        spec = self.values.specs[node]
        if spec.numel == 0:
            raise NotLowered(f"{what} is empty")
        if spec.ndim > MAX_RANK:
            raise NotLowered(f"{what} has {spec.ndim} dimensions: the library has tensors of at most {MAX_RANK}")
        return spec

    def constant(self, value: Any, what: str, dtypes: Sequence[torch.dtype] = CONSTANT_DTYPES) -> torch.Tensor:
        """The tensor a parameter stands for; NotLowered where it is computed at run time."""
        if not isinstance(value, torch.Tensor):
            raise NotLowered(f"{what} is not a constant")
        if value.dtype not in dtypes:
            raise NotLowered(f"{what} has dtype {str(value.dtype).removeprefix('torch.')}")
        return value

    def post_ops(
        self, entries: Sequence[tuple[Any, ...]], base: TensorSpec, takes: Callable[[Sequence[PostOp]], bool] = bool
    ) -> list[PostOp]:
        """Translate vocabulary post-ops; SplitPostOps at the first that cannot be absorbed.

        takes  whether the primitive takes all that is given, which ends in the one at hand (default: whatever it is)
        """
        translated: list[PostOp] = []
        for index, entry in enumerate(entries):
            post_op = translate(entry, base, self.values)
            together = None if post_op is None else append_post_ops(translated, post_op)
            if together is None or not takes(together):
                raise SplitPostOps(index)
            translated = together
        return translated


def run_time_operands(first: Sequence[fx.Node], post_ops: Sequence[PostOp]) -> tuple[fx.Node, ...]:
    """Operands of a fused node: its own, then those of binary post-ops, in order."""
    return (*first, *(p.node for p in post_ops if isinstance(p, BinaryPostOp) and p.constant is None))


def residual_to_overwrite(
    node: fx.Node, src: fx.Node, post_ops: Sequence[PostOp], context: LoweringContext
) -> fx.Node | None:
    """The residual whose memory the result may take over: added in full and once, not read later, not the input."""
    read = [p.node for p in post_ops if isinstance(p, BinaryPostOp)]
    for p in post_ops:
        if not isinstance(p, BinaryPostOp) or p.kind != "add" or not p.full or p.constant is not None:
            continue
        if p.node is not src and read.count(p.node) == 1 and context.overwritable(node, p.node):
            return p.node
    return None


def constant_name(node: fx.Node, parameter: str) -> str:
    """The name of the constant node given for a parameter of the op, "None" where none is: the key of packed copies."""
    bound = signature_of(node.target).bind(*node.args, **node.kwargs)
    return str(bound.arguments.get(parameter))


def bias_weights(node: fx.Node, bias: Any, context: LoweringContext) -> Weights | None:
    """The constant bias [N] of a convolution or linear layer, as primitives want it: dense, float32."""
    if bias is None:
        return None
    plain = context.constant(bias, "bias")
    if plain.ndim != 1:  # PyTorch's linear layers broadcast any
        raise NotLowered(f"bias is {list(plain.shape)}, no vector")
    return Weights(constant_name(node, "bias"), plain, row_major(tuple(plain.shape), torch.float32))


def strides_offered(operation: Operation) -> list[tuple[int, ...]]:
    """Strides (elements) of the plain layouts that candidates leave the value in, the likeliest first."""
    spec = operation.spec
    if operation.fallback_reason:
        return [spec.strides]
    found: dict[tuple[int, ...], None] = {}
    for candidate in operation.candidates:
        steps = candidate.dst.strides
        if steps is not None and candidate.dst.dims == spec.shape:
            found[tuple(steps)] = None
    return list(found)[:MAX_LAYOUTS]


def torch_operation(node: fx.Node, values: RegionValues, reason: str) -> Operation:
    """The node as one plain PyTorch call on operands in their eager strides and dtypes."""
    spec = values.specs[node]
    operands = values.operands(node)
    candidate = Candidate(
        implementation="torch",
        srcs=tuple(eager_layout(values.specs[n]) for n in operands),
        dst=eager_layout(spec),
        calls=(TorchTemplate(values.computation(node, operands), reason),),
    )
    kind = getattr(node.target, "__name__", str(node.target))
    return Operation(node, node.name, kind, operands, spec, [candidate], fallback_reason=reason)


def eager_layout(spec: TensorSpec) -> Any:
    """The layout eager would give the value."""
    shape, strides = spec.shape or (1,), spec.strides or (1,)
    if spec.grows:
        return GrowingDesc(shape, spec.dtype, strides)
    if is_known_dtype(spec.dtype) and is_describable(shape, strides):
        return strided(shape, spec.dtype, strides)
    return OpaqueDesc(shape, spec.dtype, strides)
