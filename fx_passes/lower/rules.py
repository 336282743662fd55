"""Which rule lowers which operation, and the walk that applies them to a region's graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.candidates import Operation
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.lower.attention.attention import lower_additive_mask, lower_attention, lower_rotary, lower_rotation
from fx_passes.lower.attention.caches import lower_cached_attention, lower_grow, lower_write_at
from fx_passes.lower.context import SPREADING, LoweringContext, NotLowered, SplitPostOps, torch_operation
from fx_passes.lower.movement.aliases import VIEWS, add_views
from fx_passes.lower.movement.concat_bags import lower_concat_bags
from fx_passes.lower.movement.embedding import lower_embedding
from fx_passes.lower.movement.embedding_bags import lower_embedding_bags
from fx_passes.lower.movement.gather import lower_pick, lower_take_rows
from fx_passes.lower.movement.movement import (
    lower_concat,
    lower_getitem,
    lower_narrow,
    lower_permute,
    lower_reshape,
    lower_roll,
)
from fx_passes.lower.movement.views import VIEW_RULES
from fx_passes.lower.pointwise.elementwise import lower_binary, lower_eltwise, lower_prelu
from fx_passes.lower.primitives import remembering
from fx_passes.lower.products.addends import adds_part, expand_addend
from fx_passes.lower.products.dynamic import lower_choose_scale, lower_dynamic_linear, lower_quantize_by
from fx_passes.lower.products.dynamic_rows import (
    lower_choose_row_scales,
    lower_dequantize_rows_by,
    lower_quantize_rows_by,
)
from fx_passes.lower.products.gated_rows import cover_gated_rows, lower_gated_row
from fx_passes.lower.products.int4 import lower_int4_linear
from fx_passes.lower.products.linear import lower_linear, lower_matmul
from fx_passes.lower.products.row_scaled_linear import lower_row_scaled_linear
from fx_passes.lower.quantized import lower_dequantize, lower_quantize
from fx_passes.lower.recurrent.expand import expand_recurrent
from fx_passes.lower.recurrent.layer import lower_recurrent_layer
from fx_passes.lower.recurrent.scan import lower_selective_scan
from fx_passes.lower.rows.group_norm import lower_group_norm
from fx_passes.lower.rows.normalization import lower_batch_norm, lower_layer_norm, lower_softmax
from fx_passes.lower.rows.row_norms import lower_l2_normalize, lower_rms_norm
from fx_passes.lower.torch_candidates import add_rivals
from fx_passes.lower.windows.convolution import lower_convolution
from fx_passes.lower.windows.deconvolution import lower_deconvolution
from fx_passes.lower.windows.gated_weights import gates_into_weights
from fx_passes.lower.windows.pooling import lower_adaptive_pool, lower_pool, lower_reduce
from fx_passes.lower.windows.resampling import lower_resample
from fx_passes.lower.windows.sampling import lower_weighted_samples
from zendnn_cffi.primitives.checks import MAX_RANK
from zendnn_cffi.runtime.courtesy import give_way

Rule = Callable[[fx.Node, LoweringContext], Operation]

RULES: dict[Callable[..., object], Rule] = {
    ops.convolution: lower_convolution,
    ops.deconvolution: lower_deconvolution,
    ops.linear: lower_linear,
    ops.int4_linear: lower_int4_linear,
    ops.matmul: lower_matmul,
    ops.recurrent_layer: lower_recurrent_layer,
    ops.selective_scan: lower_selective_scan,
    ops.pool: lower_pool,
    ops.adaptive_pool: lower_adaptive_pool,
    ops.reduce: lower_reduce,
    ops.resample: lower_resample,
    ops.weighted_samples: lower_weighted_samples,
    ops.eltwise: lower_eltwise,
    ops.binary: lower_binary,
    ops.prelu: lower_prelu,
    ops.quantize: lower_quantize,
    ops.dequantize: lower_dequantize,
    ops.choose_scale: lower_choose_scale,
    ops.quantize_by: lower_quantize_by,
    ops.dynamic_linear: lower_dynamic_linear,
    ops.choose_row_scales: lower_choose_row_scales,
    ops.quantize_rows_by: lower_quantize_rows_by,
    ops.dequantize_rows_by: lower_dequantize_rows_by,
    ops.row_scaled_linear: lower_row_scaled_linear,
    ops.batch_norm: lower_batch_norm,
    ops.layer_norm: lower_layer_norm,
    ops.group_norm: lower_group_norm,
    ops.softmax: lower_softmax,
    ops.attention: lower_attention,
    ops.cached_attention: lower_cached_attention,
    ops.additive_mask: lower_additive_mask,
    ops.grow: lower_grow,
    ops.write_at: lower_write_at,
    ops.rms_norm: lower_rms_norm,
    ops.l2_normalize: lower_l2_normalize,
    ops.rotary: lower_rotary,
    ops.rotation: lower_rotation,
    ops.embedding: lower_embedding,
    ops.embedding_bags: lower_embedding_bags,
    ops.concat_bags: lower_concat_bags,
    ops.pick: lower_pick,
    ops.take_rows: lower_take_rows,
    ops.concat: lower_concat,
    ops.roll: lower_roll,
    ops.reshape: lower_reshape,
    ops.reshape_as: lower_reshape,
    ops.flatten: lower_reshape,
    ops.unflatten: lower_reshape,
    ops.permute: lower_permute,
    ops.transpose: lower_permute,
    ops.narrow: lower_narrow,
    operator.getitem: lower_getitem,
    **VIEW_RULES,
}
SHARING = VIEWS | ops.having(shares_memory=True)


class Readers:
    """Who reads a value's memory last, so that a later result may take it over.

    Values that may share memory form a group: views with what they view, and concatenations with their pieces.
    The graph is looked at when somebody asks, and again after an edit.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._order: dict[fx.Node, int] = {}
        self._group: dict[fx.Node, list[fx.Node]] = {}

    def edited(self) -> None:
        """The graph is another one now."""
        self._order = {}

    def _look(self) -> None:
        self._order = {node: i for i, node in enumerate(self._graph.nodes)}
        self._group = {node: [node] for node in self._graph.nodes}
        for node in self._graph.nodes:
            if node.op == "call_function" and node.target in SHARING:
                for source in node.all_input_nodes:
                    self._join(self._group[source], self._group[node])

    def _join(self, a: list[fx.Node], b: list[fx.Node]) -> None:
        if a is not b:
            a += b
            for node in b:
                self._group[node] = a

    def last_to_read(self, reader: fx.Node, operand: fx.Node) -> bool:
        """Whether reader may write over operand: computed in this region, not read later, nor twice by reader."""
        if not self._order:
            self._look()
        group = self._group[operand]
        if any(node.op != "call_function" for node in group):
            return False
        readers = {user for node in group for user in node.users if user not in group}
        if any(user.op == "output" or self._order[user] > self._order[reader] for user in readers):
            return False
        return sum(node in group for node in reader.all_input_nodes) == 1


@remembering()
def lower_graph(
    graph: fx.Graph,
    inputs: Sequence[TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    *,
    compute_dtype: torch.dtype | None = None,
    allow_winograd: bool = True,
    without: Sequence[str] = (),
    join_rows: bool = True,
) -> tuple[list[Operation], RegionValues]:
    """Return an operation for every node that computes a tensor at run time, and what all nodes stand for.

    graph is edited: post-ops that no primitive absorbs become nodes of their own, recurrent stacks become layers, gates
    move into weights.
    join_rows  whether one operation covers gated products of one row: it may take a copy of weights that are read where
               they are otherwise
    """
    values = RegionValues(graph, inputs, parameters)
    expand_recurrent(graph, values)
    gates_into_weights(graph, values)
    covering = cover_gated_rows(graph, values) if join_rows and compute_dtype in (None, torch.float32) else {}
    readers = Readers(graph)
    context = LoweringContext(values, compute_dtype, readers.last_to_read, allow_winograd, without, covering)
    operations: list[Operation] = []

    def lower(node: fx.Node) -> None:
        while True:
            try:
                operation = context.operations[node] = lower_node(node, context)
                operation.with_values = partial(_lower_again, node, context)
                operations.append(operation)
                return
            except SplitPostOps as split:
                if adds_part(node, split.keep, values) and context.dtype(values.base(node)) == torch.bfloat16:
                    lower(expand_addend(node, split.keep, values))
                else:
                    split_post_ops(node, split.keep, values)
                readers.edited()

    for node in graph.nodes:  # split_post_ops inserts after the node at hand: the walk comes to what it inserted
        if node.op == "call_function" and node in values.specs and node not in context.operations:
            give_way()
            lower(node)
    return operations, values


def lower_node(node: fx.Node, context: LoweringContext) -> Operation:
    rule = RULES.get(node.target)
    try:
        if rule is None:
            raise NotLowered(f"no rule lowers {getattr(node.target, '__name__', node.target)}")
        if (covered := context.covering.get(node)) is not None:
            return lower_gated_row(node, covered, context)
        if context.values.specs[node].numel == 0:
            raise NotLowered("the result is empty")
        if (rank := context.values.specs[node].ndim) > MAX_RANK:
            raise NotLowered(f"the result has {rank} dimensions: the library has tensors of at most {MAX_RANK}")
        if node.target in SPREADING and not context.values.are_constants_finite(node):
            raise NotLowered("a constant has values that are not finite, which primitives spread or lose")
        operation = rule(node, context)
        if node.target in VIEWS:
            add_views(operation, node, context)
        add_rivals(operation, node, context)
        return operation
    except NotLowered as reason:
        seen = add_views(None, node, context) if node.target in VIEWS else None
        return seen or torch_operation(node, context.values, str(reason))


def _lower_again(node: fx.Node, context: LoweringContext, values: RegionValues) -> Operation:
    """node's operation with other constants."""
    return lower_node(node, replace(context, values=values))


def split_post_ops(node: fx.Node, keep: int, values: RegionValues) -> None:
    """Make the node's post-ops from index `keep` on nodes of their own, right after it."""
    entries = tuple(node.kwargs["post_ops"])
    graph, last = node.graph, node
    users = list(node.users)
    for entry in entries[keep:]:
        name, *args = entry
        with graph.inserting_after(last):
            if name == "eltwise":
                last = graph.call_function(ops.eltwise, (last, *args))
            elif name == "binary":
                kind, other, *is_first = args
                last = graph.call_function(ops.binary, (other, last, kind) if is_first else (last, other, kind))
            else:
                last = graph.call_function(ops.prelu, (last, *args))
        last.meta["source"] = node.meta.get("source", "")
    for user in users:
        user.replace_input_with(node, last)
    node.kwargs = {**node.kwargs, "post_ops": entries[:keep]}
    values.infer(node)
    inserted = node.next
    while True:
        values.infer(inserted)
        if inserted is last:
            break
        inserted = inserted.next
