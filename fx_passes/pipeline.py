"""The order of the passes: the only place that states it."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from fx_passes.bags.offset_bags import join_offset_bags
from fx_passes.fold.asserted_sizes import fold_asserted_sizes
from fx_passes.fold.batch_norm import fold_batch_norm
from fx_passes.fold.casts import fold_casts
from fx_passes.fold.channel_scale import fold_channel_scale
from fx_passes.fold.gates import fold_gates
from fx_passes.fold.identities import fold_identities
from fx_passes.fold.int8_layers import fold_int8_layers
from fx_passes.fold.integer_products import fold_integer_products
from fx_passes.fold.pad import fold_pad
from fx_passes.fold.products import fold_products
from fx_passes.fold.ranks import assume_ranks
from fx_passes.fold.rows import fold_rows
from fx_passes.fold.shapes import fold_shapes
from fx_passes.fold.shifted_softmax import fold_shifted_softmax
from fx_passes.fold.unsigned_products import fold_unsigned_products
from fx_passes.fold.wide_softmax import fold_wide_softmax
from fx_passes.fuse.caches import fuse_caches
from fx_passes.fuse.concatenations import chain_concatenations
from fx_passes.fuse.dynamic_quantization import fuse_dynamic_quantization
from fx_passes.fuse.embedding_bags import fuse_embedding_bags
from fx_passes.fuse.grouped_heads import fuse_grouped_heads
from fx_passes.fuse.narrow_integers import clip_narrow_integers
from fx_passes.fuse.offset_bags import fuse_offset_bags
from fx_passes.fuse.patterns import fuse_patterns
from fx_passes.fuse.permutes import fuse_permutes
from fx_passes.fuse.post_ops import fuse_post_ops
from fx_passes.fuse.projections import fuse_projections
from fx_passes.fuse.quantized_views import quantize_before_views
from fx_passes.fuse.rotations import fuse_rotations
from fx_passes.fuse.selective_scans import fuse_selective_scans
from fx_passes.fuse.stacks import write_stacks
from fx_passes.fuse.weighted_samples import fuse_weighted_samples
from fx_passes.fuse.written_attention import fuse_written_attention
from fx_passes.graph.interpreter import run
from fx_passes.graph.verify import verify
from fx_passes.memoize.per_mask import memoize_masks
from fx_passes.memoize.per_size import memoize_sizes
from fx_passes.memoize.shared_masks import note_unwritten_masks, share_masks
from fx_passes.module import OptimizedModule
from fx_passes.normalize import normalize
from fx_passes.normalize.cache_writes import spell_cache_writes
from fx_passes.normalize.created import renew_created
from fx_passes.normalize.delayed_copies import delay_copies
from fx_passes.normalize.rolled_caches import spell_rolled_caches
from fx_passes.partition import partition
from fx_passes.partition.lookups import move_lookups_in
from fx_passes.partition.partition import Constants, MakeRegion, supported_in
from fx_passes.partition.quantized_lookups import read_quantized_tables
from fx_passes.region.call_time import share_call_time
from fx_passes.report.debug_folder import CompileNotes, debug_root
from fx_passes.trace.call_structure import write_out_structure
from fx_passes.trace.trace import ExampleInputs, trace
from fx_passes.trace.traced import Traced
from zendnn_cffi.errors import interrupts

log = logging.getLogger("zendnn_cffi.passes")

Pass = Callable[[fx.GraphModule], fx.GraphModule]

PASSES: tuple[Pass, ...] = (
    renew_created,
    spell_rolled_caches,
    delay_copies,
    spell_cache_writes,
    normalize,
    assume_ranks,
    fold_casts,
    fold_wide_softmax,
    fold_shifted_softmax,
    fold_asserted_sizes,
    fold_shapes,
    fold_identities,
    fold_pad,
    fold_unsigned_products,
    fold_int8_layers,
    fold_integer_products,
    fold_products,
    fold_rows,
    fold_batch_norm,
    fold_channel_scale,
    fuse_selective_scans,
    fuse_weighted_samples,
    fuse_patterns,
    fuse_written_attention,
    fold_gates,
    fuse_dynamic_quantization,
    write_stacks,
    chain_concatenations,
    fuse_embedding_bags,
    fuse_offset_bags,
    quantize_before_views,
    clip_narrow_integers,
    fuse_projections,
    fuse_rotations,
    fuse_permutes,
    fuse_post_ops,
    fuse_caches,
    fuse_grouped_heads,
)


def cutting_passes(root: nn.Module, make_region: MakeRegion) -> tuple[Pass, ...]:
    """Those that follow: parts of the graph become modules, which read root's parameters."""
    return (
        _with(join_offset_bags, root=root, tune=tune_of(make_region)),
        _with(memoize_sizes, root=root),
        _with(memoize_masks, root=root),
        read_quantized_tables,
        move_lookups_in,
        note_unwritten_masks,
        _with(partition, make_region=make_region, root=root, supported=supported_in(_option(make_region, "dtype"))),
        share_masks,
        write_out_structure,
    )


def tune_of(make_region: MakeRegion) -> str:
    """How implementations are chosen: "off" where regions are none of ours."""
    return str(_option(make_region, "tune", "off"))


def _option(make_region: MakeRegion, name: str, default: Any = None) -> Any:
    return getattr(getattr(make_region, "options", None), name, default)


def _with(run_pass: Callable[..., fx.GraphModule], **arguments: Any) -> Pass:
    bound = functools.partial(run_pass, **arguments)
    functools.update_wrapper(bound, run_pass)
    return bound


class PlainRegion(nn.Module):
    """A region that runs its graph as plain PyTorch: what tests use, and what a region falls back to."""

    def __init__(self, graph: fx.Graph, constants: Constants, name: str) -> None:
        super().__init__()
        self.graph = graph
        self.constants = constants
        self.name = name
        self.on_lowered: Any = None  # as ZenRegion's; it is never lowered

    def forward(self, *inputs: Any) -> Any:
        return run(self.graph, self.constants, inputs)

    def invalidate(self) -> None:
        """Nothing is kept, so nothing can be stale."""


def compile_graph(
    model: nn.Module, example_inputs: ExampleInputs = None, make_region: MakeRegion = PlainRegion
) -> OptimizedModule:
    """Return model as a GraphModule whose regions make_region made; model is not changed.

    Raises ValueError if model is in training mode, TraceError if its parameters have no shape yet. A model that cannot
    be traced runs as it is, and says why in .leaves.
    """
    return build(trace(model, example_inputs), make_region=make_region)


def build(traced: Traced, *, make_region: MakeRegion = PlainRegion) -> OptimizedModule:
    """Run every pass on a traced model. What a pass fails on, a defect of ours, stays plain PyTorch with a warning."""
    try:
        return _build(traced, make_region)
    except Exception as error:
        if interrupts(error):
            raise
        log.exception("a pass failed: the model runs as plain PyTorch")
        warnings.warn(
            f"zendnn_cffi: {type(traced.root).__name__} could not be rewritten and runs as plain PyTorch"
            f" ({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return build_plain(traced)


def build_plain(traced: Traced) -> OptimizedModule:
    """Return the traced model as it is: plain PyTorch."""
    gm = OptimizedModule(traced, build_plain, {})
    gm.recompile()
    gm.begin_watch()
    return gm


def _build(traced: Traced, make_region: MakeRegion) -> OptimizedModule:
    gm: Any = OptimizedModule(traced, build, {"make_region": make_region})
    notes = CompileNotes(gm, debug_root())
    with gm.compiled_once():
        for run_pass in (*PASSES, *cutting_passes(traced.root, make_region)):
            gm = run_pass(gm)
            notes.after(run_pass.__name__, gm)
            log.debug("%s: %d nodes", run_pass.__name__, len(gm.graph.nodes))
            if log.isEnabledFor(logging.DEBUG):
                verify(gm)
    result: OptimizedModule = gm
    result.begin_watch()
    notes.end(result)
    if traced.submodules:
        made = {path: build(each, make_region=make_region) for path, each in traced.submodules.items()}
        result.take_submodules({path: submodule for path, submodule in made.items() if submodule.regions()})
    share_call_time(result)
    return result
