"""ZenRegion: the module that stands for a region of the graph and runs it as a program of primitives.

The first call with a new input signature (shapes, strides, dtypes, threads) lowers the region's graph for it; the
program is kept, least recently used first out. What cannot be lowered runs the same graph as plain PyTorch.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from threading import get_ident
from time import monotonic
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.rnn import PackedSequence

from fx_passes.aliasing.effects import written_inputs
from fx_passes.candidates.candidates import EXPONENTIALS
from fx_passes.candidates.specs import TensorSpec, evaluate_constants
from fx_passes.graph.free_sizes import growing_inputs
from fx_passes.graph.interpreter import Interpreter
from fx_passes.lower.context import NotLowered
from fx_passes.memoize.masks import OTHER, kind_of, mask_inputs, specialize
from fx_passes.memoize.watched import is_watched
from fx_passes.plan.heap import free_recent_cycles, give_back_free_memory
from fx_passes.plan.prepack import WeightStore
from fx_passes.region.call_time import CallTime
from fx_passes.region.keep import Known, SavedFor, saved_keys
from fx_passes.region.kept import Kept
from fx_passes.region.later import later
from fx_passes.region.lowered import LoweredRegion
from fx_passes.region.options import RegionOptions
from fx_passes.region.packed import PackedSequences, place_of_sequence, stack_of
from fx_passes.region.patience import Patience
from fx_passes.region.programs import Borrowed, Programs, Signature, threads_of
from zendnn_cffi.engine.brief_waits import Start, crowding
from zendnn_cffi.engine.library import is_available, unavailable_reason
from zendnn_cffi.engine.openmp import release_team
from zendnn_cffi.errors import interrupts
from zendnn_cffi.locks import is_awaited, making, new_lock
from zendnn_cffi.primitives.allocation import on_cpu
from zendnn_cffi.primitives.checks import check_storage, strides_overlap
from zendnn_cffi.runtime.callers import callers
from zendnn_cffi.runtime.courtesy import giving_way
from zendnn_cffi.values import dataclass

log = logging.getLogger("zendnn_cffi.region")

PACKED_TIMES = 6  # packed weights may take so many times the parameters' bytes; programs go where they take more
PACKED_BYTES = 4 << 20  # a region may have so many of them, however few parameters


@dataclass(frozen=True)
class RegionFactory:
    """Makes regions with these options: a callable that can be pickled, so that a pickled module can be made again.

    known  makes what each region asks before it is lowered (None: nothing)
    """

    options: RegionOptions
    known: Callable[[], Known] | None = None

    def __call__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor], name: str) -> ZenRegion:
        region = ZenRegion(graph, constants, name, self.options)
        region.known = None if self.known is None else self.known()
        return region


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
        self._give_kept()
        self._lock = new_lock()
        self._lowering_in = 0  # the thread that does
        self.programs = Programs(self._packs_too_much)
        self.patience = Patience()
        self._borrowed = Borrowed()
        self._plain: Interpreter | None = None
        self._cleared = 0  # how often: an interpreter made before has folded weights from before
        self.writes_to = written_inputs(graph)  # numbers of inputs, for fx_passes.aliasing.effects
        self._masks = mask_inputs(graph)
        placeholders = list(graph.find_nodes(op="placeholder"))
        self._growing = {placeholders.index(node): dim for node, dim in growing_inputs(graph).items()}
        self._for_masks: dict[tuple[str, ...], fx.Graph] = {}
        self.on_run: Callable[..., list[torch.Tensor]] | None = None  # set while profiling
        self.on_lowered: Callable[..., None] | None = None  # fx_passes.report.debug_folder.RegionNotes, where asked for
        self.known: Known | None = None  # programs that need no choosing: fx_passes.saved.programs
        self.call_time: CallTime | None = None  # what it shares with the other regions of its module
        self.saved_for: Sequence[SavedFor] = ()  # what the file that it comes from had programs for
        _regions.add(self)
        self._single = not isinstance(next(iter(graph.find_nodes(op="output"))).args[0], tuple | list)
        self.packed: PackedSequences | None = None  # once it was called with a packed sequence

    def forward(self, *inputs: Any) -> Any:
        """Run the region; tensors in, a tensor or a tuple of tensors out."""
        if is_watched():
            return self.run_plain(inputs)
        for value in inputs:
            if type(value) is PackedSequence:
                return self._run_packed(inputs)
            if type(value) not in _TENSORS or not value.is_cpu or value.layout is not _STRIDED or value.is_neg():
                return self.run_plain(inputs)
            if value.is_nested or value.is_quantized or value._is_zerotensor():  # zeros without memory, as autograd has
                return self.run_plain(inputs)
            if value.requires_grad and torch.is_grad_enabled():
                return self.run_plain(inputs)
            if value.untyped_storage().nbytes() < value.storage_offset() * value.itemsize + value.nbytes or (
                not value.is_contiguous()
            ):
                check_storage(value, f"an input of {self.name}")
        if torch.is_autocast_enabled("cpu"):
            return self.run_plain(inputs)
        if self._borrowed.have_moved():
            self.invalidate()
        threads: Any = torch.get_num_threads()
        if monotonic() >= crowding.next_look:
            crowding.look(threads)
        if self._masks:
            threads = threads, *(kind_of(inputs[i], keys=EXPONENTIALS not in self.options.without) for i in self._masks)
        if self._growing:
            signature = (threads, *map(self.key_of, range(len(inputs)), inputs))
        else:
            signature = (threads, *((t.shape, t.dtype, t.stride()) for t in inputs))
        lowered = self.programs.found.get(signature, _MISSING)
        if lowered is _MISSING:
            if (apart := self._apart(inputs)) is not None:
                return self.forward(*apart)
            if self._lets_wait(signature):
                return self.patience.run(signature, self.run_plain, inputs)
            lowered = self._lower(signature, inputs)
        if lowered is None:
            self.programs.touch(signature)
            return self.run_plain(inputs)
        run, on_run = lowered.sharing or lowered.program, self.on_run  # which another thread may set to None meanwhile
        outputs = run(inputs) if on_run is None else on_run(self, lowered.program, inputs)
        if lowered.program.failed:
            self._do_without(lowered.program.failed)
            return self.forward(*inputs)
        if (caller := get_ident()) != callers.alone:
            callers.called(caller, lowered.program, torch.get_num_threads())
        if later.waits_for_threads and self.programs.provisional:
            later.let_have_threads()
        return outputs[0] if self._single else tuple(outputs)

    def _run_packed(self, inputs: Sequence[Any]) -> Any:
        """Run what may be a stack of recurrent layers on a packed sequence."""
        if torch.is_autocast_enabled("cpu"):
            return self.run_plain(inputs)
        packed = self.packed  # another thread may set it to None meanwhile
        if packed is None:
            stack = stack_of(self.graph)
            if stack is None or type(inputs[place_of_sequence(stack)]) is not PackedSequence:
                return self.run_plain(inputs)
            with self._lock:
                packed = self.packed or PackedSequences(stack, self._region_of, self.run_plain, self.options.tune)
                self.packed = packed
        return packed(inputs)

    @property
    def with_packed(self) -> list[ZenRegion]:
        """This region, and the one that computes its packed sequences."""
        return [self] if self.packed is None else [self, self.packed.region]

    def _region_of(self, graph: fx.Graph) -> ZenRegion:
        """A region of another graph over the same constants."""
        region = ZenRegion(graph, self.constants, f"{self.name}_packed", self.options)
        region.patience.at_once = math.inf  # it is compared with PyTorch when it meets a size, and meets few
        return region

    def _do_without(self, kinds: set[str]) -> None:
        """Guards of such candidates failed: lower without them from now on."""
        with self._lock:
            if further := sorted(kinds.difference(self.options.without)):
                log.info("%s: a guard failed: it is lowered again without %s", self.name, ", ".join(further))
                self.options = replace(self.options, without=(*self.options.without, *further))
                self.clear()

    def _apart(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The inputs with copies of those that are windows over their own elements; None where none is, or is written.

        No program may read such: `x.unfold(1, 8, 4)`. A copy has the order of its dimensions, as eager results have.
        """
        places = [i for i, value in enumerate(inputs) if not value.is_contiguous() and _overlaps_itself(value)]
        if not places or not set(places).isdisjoint(self.writes_to):
            return None
        return [value.clone() if i in places else value for i, value in enumerate(inputs)]

    def key_of(self, number: int, value: torch.Tensor | TensorSpec) -> tuple[Any, ...]:
        """What of an input decides which program runs: of one that grows not its size, but whether there is any."""
        dim = self._growing.get(number)
        if dim is None:
            return value.shape, value.dtype, value.strides if isinstance(value, TensorSpec) else value.stride()
        shape: list[Any] = list(value.shape)
        shape[dim] = "n" if shape[dim] else 0
        return tuple(shape), value.dtype, ()

    def _lets_wait(self, signature: Signature) -> bool:
        """Whether plain PyTorch is to run, as this signature was not met often enough for a program."""
        if self.options.tune == "full" or isinstance(self.constants, Kept):  # released: it would unpack all weights
            return False
        if not self.patience.lets_wait(signature, self.programs.are_full):
            return False
        asked = threads_of(signature), self.kinds_of(signature), signature[1:]
        return asked not in self._saved_keys

    @cached_property
    def _saved_keys(self) -> frozenset[Any]:
        """Those of saved_for, which is as it is from loading on: each call of a signature that waits asks."""
        return frozenset(saved_keys(self))

    def _lower(self, signature: Signature, inputs: Sequence[torch.Tensor]) -> LoweredRegion | None:
        with self._lock:
            if signature in self.programs.found:
                return self.programs.found[signature]
            begun = time.perf_counter()
            if self._lowering_in == get_ident():  # a finalizer or signal handler, in the midst of lowering
                return None
            self._lowering_in = get_ident()
            try:
                with Start(threads_of(signature)), making():
                    lowered, reason, is_provisional = self._try_lower(inputs, self.kinds_of(signature))
            finally:
                self._lowering_in = 0
            self._keep(signature, lowered, reason)
            gain = lowered.gain if lowered else None
            self.patience.note_lowered(signature, time.perf_counter() - begun, gain, self.programs.are_full)
            if is_provisional:
                self.programs.provisional[signature] = [TensorSpec.of(value) for value in inputs]
                later.add(self)
                release_team()
            free_recent_cycles()
            give_back_free_memory()  # lowering takes several times what it leaves
            if self.on_lowered is not None:
                self.on_lowered(self, inputs, lowered, reason, time.perf_counter() - begun)
            return lowered

    def _keep(self, signature: Signature, lowered: LoweredRegion | None, reason: str) -> None:
        """Let calls run what a signature was lowered to."""
        if lowered is not None and not self._growing:
            lowered = lowered.shared_by(threads_of(signature))
        if lowered is not None:
            self._borrowed.note(lowered.program.constants, self.originals)
        self.programs.put(signature, lowered, reason)

    def kinds_of(self, signature: Signature) -> tuple[str, ...]:
        """What each mask says."""
        return signature[0][1:] if self._masks else ()

    @property
    def is_provisional(self) -> bool:
        """Whether something was estimated that is worth measuring."""
        return bool(self.programs.provisional)

    def calls(self) -> list[int]:
        """Something that every call of a program changes."""
        return [lowered.program.last_used for lowered in list(self.programs.found.values()) if lowered is not None]

    def improve(self, interrupted: Callable[[], bool]) -> bool:
        """Measure what was left out, and lower again with all of it known; whether nothing is left.

        interrupted  asked before each measurement: whether to leave it for now
        """
        from fx_passes.search.noise import made_up
        from fx_passes.search.tuner import database_of

        provisional = self.programs.provisional
        if isinstance(self.constants, Kept):  # released: the weights are there in one layout alone
            provisional.clear()
        for signature, specs in list(provisional.items()):
            if threads_of(signature) != torch.get_num_threads():
                continue
            inputs, kinds = list(map(made_up, specs)), self.kinds_of(signature)
            if database_of(self.options.tune, torch.get_num_threads()).reload() and self._lower_anew(signature, inputs):
                continue
            if interrupted():
                return False
            lowered, _, is_provisional = self._try_lower(inputs, kinds, interrupted, WeightStore(is_tried=True))
            if lowered is not None:
                lowered.program.close()
            if is_provisional or not self._lower_anew(signature, inputs):
                return False
        return not provisional

    def _lower_anew(self, signature: Signature, inputs: Sequence[torch.Tensor]) -> bool:
        """Lower by what is known, beside calls, and let these run it; False where it is to be done later.

        The lock is not held meanwhile: a call that lowers something else has it, and waits until nothing is made.
        """
        provisional = self.programs.provisional
        with giving_way(is_awaited):
            lowered, reason, is_provisional = self._try_lower(inputs, self.kinds_of(signature), lambda: True)
        while not (is_locked := self._lock.acquire(timeout=_POLL_SECONDS)) and not is_awaited():
            pass
        try:
            is_wanted = signature in provisional and signature in self.programs.found
            is_kept = is_locked and is_wanted and not is_provisional
            if is_kept:
                self._keep(signature, lowered, reason)
            elif lowered is not None:
                lowered.close()
            if is_locked and (is_kept or not is_wanted):  # else it was forgotten meanwhile, or its weights changed
                provisional.pop(signature, None)
        finally:
            if is_locked:
                self._lock.release()
        del lowered
        give_back_free_memory()  # what measuring took
        return signature not in provisional

    def lower_to_keep(self, inputs: Sequence[torch.Tensor], kinds: tuple[str, ...]) -> tuple[LoweredRegion | None, str]:
        """Lower with everything measured; return a program that holds what it was built from, or None with the reason.

        kinds  what each mask says
        """
        lowered, reason, _ = self._try_lower(inputs, kinds, interrupted=lambda: False, keep=True)
        return lowered, reason

    def _packs_too_much(self) -> bool:
        """Whether programs have to go because of the weights they packed, in layouts that differ by input sizes."""
        originals_bytes, packed_bytes = weights_bytes([self])
        return packed_bytes > max(PACKED_TIMES * originals_bytes, PACKED_BYTES)

    def graph_for(self, kinds: tuple[str, ...]) -> fx.Graph:
        """The graph for masks that say `kinds`: always the same object for the same kinds."""
        if all(kind == OTHER for kind in kinds):
            return self.graph
        if kinds not in self._for_masks:
            self._for_masks[kinds] = specialize(self.graph, self._masks, kinds)
        return self._for_masks[kinds]

    def _try_lower(
        self,
        inputs: Sequence[torch.Tensor],
        kinds: tuple[str, ...],
        interrupted: Callable[[], bool] | None = None,
        weights: WeightStore | None = None,
        keep: bool = False,
    ) -> tuple[LoweredRegion | None, str, bool]:
        """Lower for these inputs; or None with the reason, which is also warned of if it is a defect of ours.

        kinds        what each mask says
        interrupted  asked before each measurement, which may take long then (None: as in a call)
        weights      where packed weights are kept (None: the region's)
        keep         whether the result holds what it was built from
        Returns      also whether something was estimated that is worth measuring
        """
        if not is_available():
            return None, unavailable_reason() or "the library is not available", False
        if any(t.numel() == 0 for t in inputs):
            return None, "an input is empty", False
        if any(map(_overlaps_itself, inputs)):
            return None, "elements of an input share memory", False
        turn, seconds = None, self.options.tune_seconds
        call_time = self.call_time if interrupted is None and self.options.tune == "auto" else None
        if call_time is not None:
            seconds = call_time.share(self, seconds)
        try:
            with torch.inference_mode(False), torch.no_grad(), on_cpu():
                if self.known is not None and (found := self.known(self, inputs, kinds, keep)) is not None:
                    return found, "", False
                from fx_passes.region.variants import choose_variant, turn_of  # 60 modules that files do without

                turn = turn_of(replace(self.options, tune_seconds=seconds), interrupted)
                noted = None if keep or self.known is None or not self.known.wants(self) else self.known
                lowered = choose_variant(
                    self.graph_for(kinds),
                    inputs,
                    self.constants,
                    self.weights if weights is None else weights,
                    self.options,
                    self.run_plain,
                    turn,
                    keep or noted is not None,
                )
                if noted is not None and lowered.lowering is not None:
                    if turn.left_out == 0 and lowered.is_measured:
                        noted.note(self, inputs, kinds, lowered)
                    lowered.lowering.let_go()
                    lowered = replace(lowered, lowering=None)
            self._plain = None  # made to measure plain PyTorch against
            return lowered, "", turn.left_out > 0
        except NotLowered as reason:
            return None, str(reason), turn is not None and turn.left_out > 0
        except Exception as error:
            if interrupts(error):
                raise
            with torch.no_grad():
                self.run_plain(inputs)  # what PyTorch refuses too is no defect of ours: its own error goes out
            log.exception("%s: lowering failed, plain PyTorch runs instead", self.name)
            warnings.warn(
                f"zendnn_cffi: {self.name} could not be lowered and runs as plain PyTorch"
                f" ({type(error).__name__}: {error})",
                stacklevel=2,
            )
            return None, f"{type(error).__name__}: {error}", False
        finally:
            if call_time is not None and turn is not None:
                call_time.spend(turn.spent_seconds)

    def run_plain(self, inputs: Sequence[Any]) -> Any:
        """Run the region's graph as plain PyTorch on any inputs, differentiably; folded weights are computed once."""
        track = torch.is_grad_enabled() and any(map(_asks_for_gradients, inputs))
        plain = self._plain  # another thread may set it to None meanwhile
        watched, cleared = is_watched(), self._cleared
        if plain is None or watched:
            graph, parameters = self._read
            with torch.inference_mode(False):
                plain = Interpreter(graph, evaluate_constants(graph, parameters))
            if not watched:  # else they may be fakes, or part of a trace
                self._plain = plain
                if cleared != self._cleared:  # by another thread, which saw a change meanwhile
                    self._plain = None
        with torch.set_grad_enabled(track):
            return plain(inputs)

    def invalidate(self) -> None:
        """The parameters may have changed: forget programs, prepacked and folded weights."""
        with self._lock:
            self.clear()
            self.known = None
            self.weights.clear()
            self._give_kept()

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
            self.packed = None
            self._for_masks.clear()
            self._forget_plain()
            self._give_kept()

    def _give_kept(self) -> None:
        """Let programs use the packed weights that constants are kept as: these are not packed twice."""
        if isinstance(self.constants, Kept):
            self.weights.give(self.constants.packed)

    def clear(self) -> None:
        """Forget programs and what they keep; the next call lowers again."""
        with self._lock:
            self.programs.clear()
            self.patience.clear()
            self.packed = None
            self._borrowed.clear()
            self._forget_plain()

    def _forget_plain(self) -> None:
        self._cleared += 1  # first: run_plain looks at it last
        self._plain = None

    @property
    def lowered(self) -> dict[Signature, LoweredRegion | None]:
        """What was lowered, by signature; None where plain PyTorch runs."""
        with self._lock:
            return dict(self.programs.found)

    @property
    def originals(self) -> list[torch.Tensor]:
        """The parameters that the region reads, as far as they are kept plain and their layers were not replaced."""
        constants = self.constants
        if isinstance(constants, Kept):
            return constants.plain
        return [value for value in map(constants.get, constants) if value is not None]

    def reason(self, signature: Signature) -> str:
        """Why plain PyTorch runs for a signature."""
        return self.programs.reason(signature)

    def extra_repr(self) -> str:
        ops = sum(node.op == "call_function" for node in self.graph.nodes)
        return f"{ops} operations, lowered for {len(self.programs.found)} signatures"


def _asks_for_gradients(value: Any) -> bool:
    return bool(getattr(value.data if type(value) is PackedSequence else value, "requires_grad", False))


def _overlaps_itself(value: torch.Tensor | TensorSpec) -> bool:
    """Whether it is a window over its own elements; an expanded tensor, of strides 0, is none."""
    strides = value.strides if isinstance(value, TensorSpec) else value.stride()
    moving = [(size, step) for size, step in zip(value.shape, strides, strict=True) if step]
    return strides_overlap([size for size, _ in moving], [step for _, step in moving])


_STRIDED = torch.strided


def living_regions() -> list[ZenRegion]:
    """Every region of every optimized module that is alive."""
    return list(_regions)


def weights_bytes(regions: Sequence[ZenRegion]) -> tuple[int, int]:
    """Bytes of the parameters that regions read, and of the copies they packed; what they share is counted once."""
    originals = {t.data_ptr(): t for region in regions for t in region.originals}
    packed = {id(t): t for region in regions for t in region.weights.copies(region.originals)}
    return sum(t.nbytes for t in originals.values()), sum(t.nbytes for t in packed.values())


_regions: weakref.WeakSet[ZenRegion] = weakref.WeakSet()
_TENSORS = (torch.Tensor, nn.Parameter)
_MISSING: Any = object()
_POLL_SECONDS = 0.02
