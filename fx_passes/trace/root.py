"""The graph of one module tree: torch.export's, or symbolic tracing's with some submodules kept whole.

nn.Transformer and its parts, nn.MultiheadAttention among them, are one operation each for symbolic tracing: with
example inputs, torch.export goes first. So it does where torch.fx.wrap hides a function with several results, or with
weights.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import types
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.aliasing.effects import is_known_function, may_write_to_held, qualified_name
from fx_passes.graph.graph import is_call
from fx_passes.graph.hooks import hooked_inside
from fx_passes.trace.asked import GRADIENTS, states_told, ways_told
from fx_passes.trace.compared import differs_on_example
from fx_passes.trace.decisions import decided
from fx_passes.trace.export import StateChanged, export, fill_tables_of_dynamo, is_exported
from fx_passes.trace.guards import Call
from fx_passes.trace.named import Named
from fx_passes.trace.quantized_layers import ask_for_dtype
from fx_passes.trace.reached import Reached
from fx_passes.trace.refusals import key_of
from fx_passes.trace.repeated import changes_when_called
from fx_passes.trace.sizes import FreeSizes, TimeLeft
from fx_passes.trace.states import States, settings_kept
from fx_passes.trace.submodules import detectors
from fx_passes.trace.symbolic import (
    CHANGES,
    LEFT_OUT,
    ONE_OBJECT,
    refuse_writes_beside_arrays,
    trace_symbolically,
    writes_refused,
)
from fx_passes.trace.traced import WHOLE, Traced, Untraceable, forward_signature
from fx_passes.trace.wrapped import has_wrapped
from zendnn_cffi.errors import is_of_signal_handler
from zendnn_cffi.values import dataclass

log = logging.getLogger("zendnn_cffi.passes")

# Modules of torch.nn that symbolic tracing takes for one operation, and torch.export takes apart.
_COMPOSITE = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer,
              nn.Transformer, nn.MultiheadAttention)  # fmt: skip
_REASON = 300  # characters of torch.export's messages that are kept
_DETECTOR = "a detector, which keeps as many boxes as the data says: no graph"


@dataclass
class Ways:
    """The ways to a graph over root, one after another, and what was found out on them.

    taken              arguments that are fixed to a value, and the names of those that have to be given
    left               the time for following free sizes
    leaves             submodules that are kept whole -> why
    refused            why there is no exported graph; "" before one was tried
    stateful, written  what forwards change and write to, as Traced has them
    wants_example      whether an example would tell more
    """

    root: nn.Module
    example: Call | None
    taken: tuple[Mapping[str, Any], frozenset[str]]
    sizes: FreeSizes
    left: TimeLeft
    leaves: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    stateful: tuple[str, ...] = ()
    written: tuple[tuple[str, str], ...] = ()
    wants_example: bool = False

    def __post_init__(self) -> None:
        root, example = self.root, self.example
        self.values, self.reached = by_name(root, example), Reached(root)
        is_composite = any(isinstance(module, _COMPOSITE) for module in root.modules()) or ask_for_dtype(root)
        self.exports_first = is_composite or is_exported(root)
        self.wants_example = is_composite and example is None and not is_exported(root)

    def traced(self) -> Traced:
        """The first graph that there is, over root itself, or root without one.

        Root is changed by constants that its forward makes alone.
        """
        if self.example is not None and self.exports_first and (found := self._by_export()) is not None:
            return found
        decides = not self.sizes.has_one_graph and _takes_images(self.root, self.values) and not detectors(self.root)
        while WHOLE not in self.leaves:
            try:
                with writes_refused(self.root):
                    found = self._by_symbols(decides)
            except Untraceable as failure:
                if (exported := self._after(failure)) is not None:
                    return exported
            else:
                return self._looking_inside(found) or self._completed(found)
        self.wants_example = self.example is None
        return self._completed(Traced(self.root, None, self.leaves))

    def _by_export(self) -> Traced | None:
        """The exported graph; where there is none, it is noted why."""
        assert self.example is not None
        try:
            return _trace_by_export(self.root, self.reached, self.example, self.sizes, self.left)
        except Untraceable as failure:
            self.refused, self.stateful = str(failure), (*self.stateful, *failure.stateful)
        return None

    def _by_symbols(self, decides: bool) -> Traced:
        """The graph that symbolic tracing makes; of what torch.fx.wrap hides, too, where the example decides."""
        given = self.leaves, *self.taken, self.values
        if decides and has_wrapped(self.reached.spaces):
            with contextlib.suppress(Untraceable):
                return trace_symbolically(self.root, self.reached, *given, decides=True, follows_wrapped=True)
        return trace_symbolically(self.root, self.reached, *given, decides=decides)

    def _looking_inside(self, found: Traced) -> Traced | None:
        """The exported graph, where the one found has a function that torch.fx does not look into."""
        unseen, several = ("", False) if self.refused or self.leaves else _unseen(found.graph)
        if not unseen or (self.sizes.has_one_graph and not several):
            return None
        because = f"torch.fx does not look into {unseen}()"
        log.info("%s: %s", type(self.root).__name__, because)
        self.wants_example = self.example is None
        if self.example is not None:
            free = self.sizes if several else self.sizes.by_example(because)
            with contextlib.suppress(Untraceable):
                return _trace_by_export(self.root, self.reached, self.example, free, self.left)
        return None

    def _after(self, failure: Untraceable) -> Traced | None:
        """The exported graph where symbolic tracing failed; where there is none, more submodules are kept whole."""
        is_for_export = not (self.leaves or failure.stateful or failure.is_final)
        self.wants_example = self.wants_example or (is_for_export and self.example is None)
        if self.example is not None and is_for_export:
            if not self.refused and (exported := self._by_export()) is not None:
                return exported
            failure.reasons = {path: f"{self.refused}; symbolically: {text}" for path, text in failure.reasons.items()}
        self.stateful, self.written = (*self.stateful, *failure.stateful), (*self.written, *failure.written)
        log.info("%s: %s%s", type(self.root).__name__, failure, remedy(self.example))
        self.leaves = keep_whole(self.leaves, failure.reasons)
        return None

    def _completed(self, found: Traced) -> Traced:
        return replace(
            found,
            stateful=self.stateful,
            written=self.written,
            sizes=self.sizes,
            wants_example=self.wants_example,
            decided_by=self.example if found.graph is not None and decided(found.graph) else None,
        )


def _unseen(graph: fx.Graph | None) -> tuple[str, bool]:
    """The name of a function that torch.fx.wrap hides, and whether several results of it are read; "" for none.

    Not even what is a tensor among several is known, so what follows stays outside of regions, too. One that is given
    weights has layers inside: the attention of torchvision's Swin transformers. Of others the graph is taken, as an
    exported one may hold for fewer sizes.
    """
    found = "", False
    for node in () if graph is None else graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, types.FunctionType):
            continue
        if is_known_function(node.target) or all(map(_is_size, node.all_input_nodes)):
            continue
        if any(is_call(user, operator.getitem) for user in node.users):
            return qualified_name(node.target), True
        if any(source.op == "get_attr" for source in node.all_input_nodes):
            found = qualified_name(node.target), False
    return found


def _is_size(node: fx.Node) -> bool:
    """Whether node is a size of a tensor, or computed of sizes, as tracing writes it."""
    if node.op == "call_method":
        return node.target == "size"
    if is_call(node, getattr):
        return node.args[1] == "shape"
    of_python = node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator"
    return of_python and bool(node.all_input_nodes) and all(map(_is_size, node.all_input_nodes))


def keep_whole(leaves: Mapping[str, str], reasons: Mapping[str, str]) -> dict[str, str]:
    """Return leaves with one more for each path: the module itself, or the nearest one around what is kept already."""
    found = dict(leaves)
    for path, reason in reasons.items():
        while leaf := next((leaf for leaf in leaves if leaf == path or path.startswith(f"{leaf}.")), ""):
            path = leaf.rpartition(".")[0]
        found[path] = reason
    return {p: r for p, r in found.items() if not any(p != o and (o == WHOLE or p.startswith(f"{o}.")) for o in found)}


def _trace_by_export(root: nn.Module, reached: Reached, example: Call, sizes: FreeSizes, left: TimeLeft) -> Traced:
    """The exported graph."""
    if found := detectors(root):
        raise Untraceable({found[0]: _DETECTOR})
    if hooked := hooked_inside(root):
        raise Untraceable({WHOLE: f"torch.export: {hooked} has hooks, which a graph would not run"})
    fill_tables_of_dynamo()
    try:
        states, ways, flags = set[str](), set[str](), States()
        comparing: list[str] = []
        asking, wondering = states_told(states.add, reached.spaces), ways_told(ways.add)
        answered, comparing_told = reached.answered("type", "isinstance"), reached.comparisons_told(comparing.append)
        hearing = flags.heard(reached.spaces)
        with answered, asking, wondering, comparing_told, hearing, settings_kept(reached.spaces) as set_otherwise:
            graph, guards = export(root, *example, sizes, left)
        if GRADIENTS in states:
            guards.forbid_gradients()
    except StateChanged as error:
        log.info("torch.export: %s", error)
        raise Untraceable(error.changed, tuple(error.changed)) from error
    except Exception as error:  # whatever the model's own code or torch.export raises
        if is_of_signal_handler(error):
            raise
        reason = f"torch.export: {type(error).__name__}: {error}".splitlines()[0][:_REASON]
        log.info("%s", reason)
        raise Untraceable({WHOLE: reason}) from error
    if others := sorted(states - {GRADIENTS}):
        raise Untraceable({WHOLE: f"its forward asks for {others[0]}(), which a graph does not tell"})
    if set_otherwise:
        raise Untraceable({WHOLE: f"its forward sets {set_otherwise[0]}{LEFT_OUT}"})
    if comparing:
        raise Untraceable({WHOLE: f"{comparing[0]}(){ONE_OBJECT}"})
    if (ways or reached.catches_exceptions) and differs_on_example(
        root, graph, example, trusted=not reached.has_near_code
    ):
        why = f"asks for {min(ways)}()" if ways else "catches exceptions"
        raise Untraceable({WHOLE: f"its forward {why}, and computes something else where it is traced"})
    refuse_writes_beside_arrays(graph, root)
    if reached.has_near_code and changes_when_called(root, example, writes=may_write_to_held(graph, root)):
        raise Untraceable({WHOLE: CHANGES}, (WHOLE,))
    read = tuple(flags.read.values())
    if others := [state.name for state in read if not state.holds()]:
        raise Untraceable({WHOLE: f"its forward asks for {others[0]}, which is another while torch.export traces"})
    named = Named.of(root, reached)
    return Traced(root, graph, guards=guards, example=example, sizes=guards.sizes, states=read, named=named)


def _takes_images(root: nn.Module, values: Mapping[str, Any] | None) -> bool:
    """Whether a network of convolutions is given images, and nothing else: they have few sizes.

    Sequences have many, and so have caches: torch.export's graphs serve these by one program.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    has_images = values is not None and len(leaves) == 1 and leaves[0].ndim == 4 and key_of(values) is not None
    return has_images and any(isinstance(module, nn.Conv2d) for module in root.modules())


def remedy(example: Call | None) -> str:
    """The end of a reason where there was no example."""
    return "" if example is not None else " (with example_inputs, torch.export would be tried)"


def by_name(model: nn.Module, example: Call | None) -> dict[str, Any] | None:
    """The arguments of an example by name."""
    if example is None:
        return None
    return {**dict(zip(forward_signature(model).parameters, example[0], strict=False)), **example[1]}
