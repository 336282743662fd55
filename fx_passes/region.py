"""ZenRegion: the module that stands for a region of the graph and runs it as a program of primitives.

The first call with a new input signature (shapes, strides, dtypes, threads) lowers the region's graph for it; the
program is kept, least recently used first out. What cannot be lowered runs the same graph as plain PyTorch.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

import zendnn_cffi
from fx_passes.growing import growing_inputs
from fx_passes.lower.attention_exponentials import counted
from fx_passes.lower.compile import LoweredRegion
from fx_passes.lower.context import NotLowered
from fx_passes.lower.masks import OTHER, kind_of, mask_inputs, specialize
from fx_passes.lower.specs import evaluate_constants
from fx_passes.lower.variants import choose_variant
from fx_passes.plan.prepack import WeightStore
from fx_passes.plan.release import Kept
from fx_passes.watched import is_watched

log = logging.getLogger("zendnn_cffi.region")

MAX_PROGRAMS = 32
# threads, or (threads, what each mask says); then (shape, dtype, strides) of each input. Of one that grows (caches,
# their masks) all but the size that does.
Signature = tuple[Any, ...]


@dataclass(frozen=True)
class RegionOptions:
    """How regions are lowered; a callable that makes one, so that a pickled module can be made again.

    dtype           dtype of activations and weights inside (None: each value's own)
    allow_winograd  whether convolutions may use Winograd's algorithm
    tune            "auto", "off" or "full": how implementations are chosen (fx_passes.search.tuner)
    release_weights whether weights are to be few: the parameters will be given up (fx_passes.plan.release)
    exponentials    whether attention may leave out the softmax's maximum (fx_passes.lower.attention_exponentials)
    """

    dtype: torch.dtype | None = None
    allow_winograd: bool = True
    tune: str = "auto"
    release_weights: bool = False
    exponentials: bool = True

    def __call__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor], name: str) -> ZenRegion:
        return ZenRegion(graph, constants, name, self)


class ZenRegion(nn.Module):
    """A region of an optimized module.

    graph      the region in the vocabulary of fx_passes.ops
    constants  parameters by the names that graph's get_attr nodes have
    """

    def __init__(
        self, graph: fx.Graph, constants: Mapping[str, torch.Tensor], name: str, options: RegionOptions
    ) -> None:
        super().__init__()
        self._read = graph, constants
        self.name = name
        self.options = options
        self.weights = WeightStore()
        self._lock = threading.RLock()
        self._lowered: OrderedDict[Signature, LoweredRegion | None] = OrderedDict()
        self._reasons: dict[Signature, str] = {}
        self._plain: tuple[fx.Graph, dict[fx.Node, Any], dict[fx.Node, list[fx.Node]]] | None = None
        self._masks = mask_inputs(graph)
        placeholders = list(graph.find_nodes(op="placeholder"))
        self._growing = {placeholders.index(node): dim for node, dim in growing_inputs(graph).items()}
        self._for_masks: dict[tuple[str, ...], fx.Graph] = {}
        self.on_run: Callable[..., list[torch.Tensor]] | None = None  # set while profiling
        _regions.add(self)
        self._single = not isinstance(next(iter(graph.find_nodes(op="output"))).args[0], tuple | list)

    def forward(self, *inputs: Any) -> Any:
        """Run the region; tensors in, a tensor or a tuple of tensors out."""
        if is_watched():
            return self.run_plain(inputs)
        for value in inputs:
            if type(value) not in _TENSORS or not value.is_cpu or value.layout is not _STRIDED or value.is_neg():
                return self.run_plain(inputs)
            if value.is_nested or value.is_quantized:
                return self.run_plain(inputs)
            if value.requires_grad and torch.is_grad_enabled():
                return self.run_plain(inputs)
        if torch.is_autocast_enabled("cpu"):
            return self.run_plain(inputs)
        threads: Any = torch.get_num_threads()
        if self._masks:
            threads = threads, *(kind_of(inputs[i], keys=self.options.exponentials) for i in self._masks)
        if self._growing:
            signature = (threads, *map(self._key, range(len(inputs)), inputs))
        else:
            signature = (threads, *((t.shape, t.dtype, t.stride()) for t in inputs))
        lowered = self._lowered.get(signature, _MISSING)
        if lowered is _MISSING:
            lowered = self._lower(signature, inputs)
        elif len(self._lowered) == MAX_PROGRAMS:  # only then does it matter which was used last
            self._touch(signature)
        if lowered is None:
            return self.run_plain(inputs)
        program, before = lowered.program, counted.out_of_range
        outputs = program(inputs) if self.on_run is None else self.on_run(self, program, inputs)
        if counted.out_of_range != before:
            self._give_up_exponentials()
            return self.forward(*inputs)
        return outputs[0] if self._single else tuple(outputs)

    def _give_up_exponentials(self) -> None:
        """Scores were too large for attention without a softmax: lower without from now on."""
        with self._lock:
            if self.options.exponentials:
                log.info("%s: large scores: attention is lowered again, with a softmax", self.name)
                self.options = replace(self.options, exponentials=False)
                self.clear()

    def _key(self, number: int, value: torch.Tensor) -> tuple[Any, ...]:
        """What of an input decides which program runs: of one that grows not its size, but whether there is any."""
        dim = self._growing.get(number)
        if dim is None:
            return value.shape, value.dtype, value.stride()
        shape: list[Any] = list(value.shape)
        shape[dim] = "n" if shape[dim] else 0
        return tuple(shape), value.dtype, ()

    def _lower(self, signature: Signature, inputs: Sequence[torch.Tensor]) -> LoweredRegion | None:
        with self._lock:
            if signature in self._lowered:
                return self._lowered[signature]
            lowered, reason = self._try_lower(inputs, signature[0][1:] if self._masks else ())
            if lowered is None:
                self._reasons[signature] = reason
            while len(self._lowered) >= MAX_PROGRAMS:
                self._drop_oldest()
            self._lowered[signature] = lowered
            return lowered

    def _touch(self, signature: Signature) -> None:
        with self._lock:
            if signature in self._lowered:
                self._lowered.move_to_end(signature)

    def _drop_oldest(self) -> None:
        """Forget the least recently used program, or a signature without one where there is none."""
        used = {signature: lowered.program.last_used for signature, lowered in self._lowered.items() if lowered}
        old = min(used, key=used.__getitem__) if used else next(iter(self._lowered))
        lowered = self._lowered.pop(old)
        self._reasons.pop(old, None)
        if lowered is not None:
            lowered.program.close()

    def _graph_for(self, kinds: tuple[str, ...]) -> fx.Graph:
        """The graph for masks that say `kinds`: always the same object for the same kinds."""
        if all(kind == OTHER for kind in kinds):
            return self.graph
        if kinds not in self._for_masks:
            self._for_masks[kinds] = specialize(self.graph, self._masks, kinds)
        return self._for_masks[kinds]

    def _try_lower(self, inputs: Sequence[torch.Tensor], kinds: tuple[str, ...]) -> tuple[LoweredRegion | None, str]:
        """Lower for these inputs; or None with the reason, which is also warned of if it is a defect of ours.

        kinds  what each mask says
        """
        if not zendnn_cffi.is_available():
            return None, zendnn_cffi.unavailable_reason() or "the library is not available"
        if any(t.numel() == 0 for t in inputs):
            return None, "an input is empty"
        try:
            with torch.inference_mode(False), torch.no_grad(), _on_cpu():
                lowered = choose_variant(
                    self._graph_for(kinds), inputs, self.constants, self.weights, self.options, self.run_plain
                )
            self._plain = None  # made to measure plain PyTorch against
            return lowered, ""
        except NotLowered as reason:
            return None, str(reason)
        except Exception as error:
            with torch.no_grad():
                self.run_plain(inputs)  # what PyTorch refuses too is no defect of ours: its own error goes out
            log.exception("%s: lowering failed, plain PyTorch runs instead", self.name)
            warnings.warn(
                f"zendnn_cffi: {self.name} could not be lowered and runs as plain PyTorch"
                f" ({type(error).__name__}: {error})",
                stacklevel=2,
            )
            return None, f"{type(error).__name__}: {error}"

    def run_plain(self, inputs: Sequence[Any]) -> Any:
        """Run the region's graph as plain PyTorch on any inputs, differentiably; folded weights are computed once."""
        track = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in inputs)
        plain = self._plain  # another thread may set it to None meanwhile
        watched = is_watched()
        if plain is None or watched:
            graph, parameters = self._read
            with torch.inference_mode(False):
                plain = graph, evaluate_constants(graph, parameters), _last_reads(graph)
            if not watched:  # else they may be fakes, or part of a trace
                self._plain = plain
        graph, constants, last_reads = plain
        values: dict[fx.Node, Any] = dict(constants)
        remaining = iter(inputs)
        with torch.set_grad_enabled(track):
            for node in graph.nodes:
                if node.op == "placeholder":
                    values[node] = next(remaining)
                elif node.op == "output":
                    return fx.node.map_arg(node.args[0], values.__getitem__)
                elif node not in values:
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = node.target(*args, **kwargs)
                    del args, kwargs
                for dead in last_reads.get(node, ()):
                    values.pop(dead, None)  # of what was folded, not all is there
        raise AssertionError("a graph without an output")

    def invalidate(self) -> None:
        """The parameters may have changed: forget programs, prepacked and folded weights."""
        with self._lock:
            self.clear()
            self._reasons.clear()
            self.weights.clear()

    @property
    def graph(self) -> fx.Graph:
        """The region in the vocabulary of fx_passes.ops."""
        return self._read[0]

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """What graph's get_attr nodes stand for, by target."""
        return self._read[1]

    def begin_at(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
        """Compute the same from other constants; programs stay."""
        with self._lock:
            self._read = graph, constants
            self._for_masks.clear()
            self._plain = None

    def clear(self) -> None:
        """Forget programs and what they keep; the next call lowers again."""
        with self._lock:
            for lowered in self._lowered.values():
                if lowered is not None:
                    lowered.program.close()
            self._lowered.clear()
            self._plain = None

    @property
    def lowered(self) -> dict[Signature, LoweredRegion | None]:
        """What was lowered, by signature; None where plain PyTorch runs."""
        with self._lock:
            return dict(self._lowered)

    @property
    def originals(self) -> list[torch.Tensor]:
        """The parameters that the region reads, as far as they are kept plain."""
        constants = self.constants
        return constants.plain if isinstance(constants, Kept) else [constants[name] for name in constants]

    def reason(self, signature: Signature) -> str:
        """Why plain PyTorch runs for a signature."""
        return self._reasons.get(signature, "")

    def extra_repr(self) -> str:
        ops = sum(node.op == "call_function" for node in self.graph.nodes)
        return f"{ops} operations, lowered for {len(self._lowered)} signatures"


def _last_reads(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The values that each node is the last to read: nothing needs their memory any longer."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        found[node] = [operand for operand in node.all_input_nodes if operand not in seen]
        seen.update(node.all_input_nodes)
    return found


def _on_cpu() -> AbstractContextManager[Any]:
    """New tensors on the CPU, whatever the default device."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


_STRIDED = torch.strided


def living_regions() -> list[ZenRegion]:
    """Every region of every optimized module that is alive."""
    return list(_regions)


def weights_bytes(regions: Sequence[ZenRegion]) -> tuple[int, int]:
    """Bytes of the parameters that regions read, those they share counted once, and of the copies they packed."""
    originals = {t.data_ptr(): t for region in regions for t in region.originals}
    packed = sum(region.weights.size_bytes(region.originals) for region in regions)
    return sum(t.numel() * t.element_size() for t in originals.values()), packed


_regions: weakref.WeakSet[ZenRegion] = weakref.WeakSet()
_TENSORS = (torch.Tensor, nn.Parameter)
_MISSING: Any = object()
