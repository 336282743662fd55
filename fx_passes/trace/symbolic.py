"""Symbolic tracing: forward runs once, on values that note what is done with them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrizations, parametrize

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.aliasing.effects import may_write_to_held, writes
from fx_passes.graph.graph import CREATED, copy_graph, get_attribute
from fx_passes.graph.hooks import computed_weights, has_hooks, has_own_forward, set_computed_weights
from fx_passes.graph.skeleton_module import SkeletonModule
from fx_passes.trace.arrays import shared
from fx_passes.trace.aside import writes_aside
from fx_passes.trace.asked import GRADIENTS, states_told
from fx_passes.trace.computed import computing_noted
from fx_passes.trace.constant_tensors import make_constants
from fx_passes.trace.decisions import ByExample, decided, sets_sizes_in_place
from fx_passes.trace.extremes import extremes_recorded
from fx_passes.trace.in_place import buffers_kept
from fx_passes.trace.kinds import Kinds
from fx_passes.trace.named import Named
from fx_passes.trace.one_thread import say_who_traces
from fx_passes.trace.outputs import is_plain, needs_remaking, remake
from fx_passes.trace.proxies import Questions, RecordingProxy
from fx_passes.trace.reached import Reached
from fx_passes.trace.recurrent import graph_of_recurrent
from fx_passes.trace.repeated import first_difference
from fx_passes.trace.seeding import refuse_seeding
from fx_passes.trace.settled import settle
from fx_passes.trace.skeleton import Held, skeleton
from fx_passes.trace.state import Snapshot, arrays_of
from fx_passes.trace.states import States, settings_kept
from fx_passes.trace.time_limit import MOST_CALLS
from fx_passes.trace.traced import WHOLE, Traced, Untraceable, forward_signature
from fx_passes.trace.tuples import in_tuples
from fx_passes.trace.wrapped import wrapped_followed
from zendnn_cffi.errors import is_of_signal_handler
from zendnn_cffi.values import dataclass

CHANGES = "its forward computes something else each time"
LEFT_OUT = ", which a graph would leave out"
ONE_OBJECT = " asks whether values are one object, which a graph does not tell"


class SubmoduleTracer(fx.Tracer):
    """Symbolic tracer that remembers in which submodule tracing failed, and keeps given submodules whole."""

    def __init__(
        self,
        root: nn.Module,
        reached: Reached,
        leaves: Mapping[str, str],
        specialized: Mapping[str, Any],
        example: Mapping[str, Any] | None,
        decides: bool,
    ) -> None:
        super().__init__()
        by_example = ByExample(root, example) if decides and example is not None else None
        self.questions = Questions(Kinds(root, example), lambda: self.scope.module_path, by_example)
        self.reached = reached
        # Without this a buffer is read, and written, as the tensor it is while tracing.
        self.proxy_buffer_attributes = True
        self.leaves = leaves
        self.specialized = specialized
        self.failed: str | None = None
        self.thread = threading.get_ident()
        self.autocast = torch.is_autocast_enabled("cpu")
        self.hooked = {id(module) for module in root.modules() if has_hooks(module)}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return RecordingProxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        what = "symbolically traced variables cannot be used as inputs to control flow"
        found: bool = self.questions.decide(obj.node, "bool", what)
        return found

    def refuse_state(self, name: str) -> None:
        """A graph is called in whatever state."""
        asks = "whether gradients are enabled" if name == GRADIENTS else f"for {name}(), which a graph does not tell"
        raise self.questions.refuse(f"its forward asks {asks}")

    def note_comparison(self, name: str) -> None:
        """A result of eager may be its own operand, or another one that was returned before."""
        self.questions.refuse(f"{name}(){ONE_OBJECT}")

    def keys(self, obj: fx.Proxy) -> Any:
        raise self.questions.refuse("the keys of a traced value")

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if torch.is_autocast_enabled("cpu") != self.autocast:
            raise NotImplementedError("its forward switches autocast, which a graph would leave out")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if a is self.root:
            raise NotImplementedError("its forward returns the model itself")
        if not needs_remaking(a):
            return super().create_arg(a)
        function, values = remake(a)
        return self.create_node("call_function", function, tuple(self.create_arg(value) for value in values), {})

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            module_qualified_name in self.leaves
            or has_hooks(m)
            or isinstance(m, torch.jit.ScriptModule)
            or (
                super().is_leaf_module(m, module_qualified_name)
                and not is_parametrization(m)
                and not computed_weights(m)
            )
        )

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:  # modules that other threads call meanwhile come here, too
            return forward(*args, **kwargs)
        if has_hooks(m) != (id(m) in self.hooked):
            raise self.questions.refuse("its forward registers hooks")
        if self.reached.unclear and not self.is_leaf_module(m, path := self.path_of_module(m)):
            unclear = self.reached.why_unclear(m)
            if unclear is not None:
                self.failed = self.failed or path
                raise NotImplementedError(unclear)
        before = {name: m.__dict__[name] for name in computed_weights(m) if name in m.__dict__}
        try:
            return in_tuples(m, super().call_module(m, forward, args, kwargs), args, kwargs)
        except Exception:
            if self.failed is None:
                self.failed = self.path_of_module(m)
            raise
        finally:
            m.__dict__.update(before)  # in place of what hooks computed of the graph's values

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: dict[str, Any] | tuple[Any, ...] | None = None
    ) -> tuple[Any, list[Any]]:
        say_who_traces()
        root_fn, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        for arg in args:
            if isinstance(arg, fx.Proxy) and arg.node.args and not is_plain(arg.node.args[0]):
                arg.node.args = (None,)  # generated code cannot write it; it is specialized
        return self._with_computed_weights(root_fn), [
            self.specialized[arg.node.target]
            if isinstance(arg, fx.Proxy) and arg.node.target in self.specialized
            else arg
            for arg in args
        ]

    def _with_computed_weights(self, forward: Any) -> Any:
        """The root's forward after its own hooks that compute weights, which are those of the graph's values then."""
        root: Any = self.root
        if not (names := computed_weights(root)):
            return forward

        def computed(*args: Any) -> Any:
            before = {name: root.__dict__[name] for name in names if name in root.__dict__}
            try:
                set_computed_weights(root, args[1:])
                return forward(*args)
            finally:
                root.__dict__.update(before)

        return computed


def is_parametrization(module: nn.Module) -> bool:
    """Whether module computes its parameters from others, or is what computes them: traced through, that is folded."""
    parts_of_it = type(module).__module__ in (parametrize.__name__, parametrizations.__name__)
    return parts_of_it or parametrize.is_parametrized(module)


@contextlib.contextmanager
def writes_refused(root: nn.Module) -> Iterator[None]:
    """Raise Untraceable where tracing root would have written to its memory, and let one raised inside say so.

    Tensors that a forward is handed, by parameters() say, stand for themselves.
    """
    with writes_aside(root) as aside:
        try:
            yield
        except Untraceable as failure:
            failure.written = tuple(aside.names())
            raise
    if written := aside.names():
        raise Untraceable({WHOLE: f"its forward writes to {written[0][1]}{LEFT_OUT}"}, (WHOLE,), written=written)


def trace_symbolically(
    root: nn.Module,
    reached: Reached,
    leaves: Mapping[str, str],
    specialized: Mapping[str, Any],
    given: frozenset[str],
    example: Mapping[str, Any] | None,
    decides: bool = False,
    follows_wrapped: bool = False,
) -> Traced:
    """Return the graph of root. Raises Untraceable. Within writes_refused: a forward could write to root's memory.

    decides          whether the example answers what forward asks of sizes: the graph is for calls with these answers
    follows_wrapped  whether functions that torch.fx.wrap hides are followed as well
    """
    if has_own_forward(root):
        raise Untraceable({WHOLE: "it has a forward in place of its class's, which torch.fx traces"})
    traced_root = skeleton(root, own_state=True)
    make_tracer = functools.partial(SubmoduleTracer, traced_root, reached, leaves, specialized, example, decides)
    tracer, again = make_tracer(), make_tracer() if reached.has_near_code else None
    rng, before, states = torch.get_rng_state(), Snapshot(traced_root), States()
    inside = tuple(f"{leaf}." for leaf in leaves)
    once = {path: why for path, why in before.unrepeatable().items() if not f"{path}.".startswith(inside)}
    if once:
        raise Untraceable(once)
    try:
        with _watched(tracer, states, follows_wrapped) as noticed:
            graph = _followed(traced_root, tracer, again, before, noticed)
    except Untraceable:
        raise
    except Exception as error:  # whatever the model's own code raises when it meets a Proxy
        if is_of_signal_handler(error):
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Untraceable({**tracer.questions.refused, tracer.failed or WHOLE: reason}) from error
    finally:
        torch.set_rng_state(rng)
        before.restore_shared()
    _assume_compared(tracer, graph, root, specialized)
    if tracer.questions.refused:  # and caught by what asked
        raise Untraceable(tracer.questions.refused)
    noticed.refuse()
    _settle_decisions(tracer, graph, example or {})
    _keep_created(graph, traced_root, root)
    if reached.compares_arguments_to_none:
        _assume_required(tracer, graph, root)
    assumed, read = tuple(tracer.questions.kinds.assumed.values()), tuple(states.read.values())
    return Traced(
        root, graph, dict(leaves), dict(specialized), given, assumed=assumed, states=read, named=Named.of(root, reached)
    )


@dataclass
class _Noticed:
    """What a forward did while it was traced, and a graph would leave out.

    set_otherwise  settings that it set and left so
    draws          whether it drew random numbers
    changed        what it changed, by the path of the module
    computed       functions that it called on parameters
    """

    set_otherwise: Sequence[str]
    draws: bool = False
    changed: Mapping[str, str] = field(default_factory=dict)
    computed: Sequence[str] = ()

    def refuse(self) -> None:
        """Raise Untraceable for the first of these."""
        if self.set_otherwise:
            raise Untraceable({WHOLE: f"its forward sets {self.set_otherwise[0]}{LEFT_OUT}"}, is_final=True)
        if self.draws:
            raise Untraceable({WHOLE: "its forward draws random numbers that a graph would freeze"})
        if self.changed:
            raise Untraceable(self.changed, tuple(self.changed))
        if self.computed:
            raise Untraceable(
                {WHOLE: f"its forward calls {self.computed[0]}() on parameters that a graph would freeze"}
            )


@contextlib.contextmanager
def _watched(tracer: SubmoduleTracer, states: States, follows_wrapped: bool) -> Iterator[_Noticed]:
    """Let functions that do not meet the traced values tell tracer, or states, what is asked of them."""
    reached = tracer.reached
    with contextlib.ExitStack() as stack:
        if follows_wrapped:
            stack.enter_context(wrapped_followed(reached.spaces))
        stack.enter_context(refuse_seeding())
        stack.enter_context(extremes_recorded())
        stack.enter_context(reached.answered("type", "callable"))
        stack.enter_context(states_told(tracer.refuse_state, reached.spaces))
        stack.enter_context(reached.comparisons_told(tracer.note_comparison))
        stack.enter_context(states.heard(reached.spaces))
        yield _Noticed(stack.enter_context(settings_kept(reached.spaces)))


def _followed(
    root: nn.Module, tracer: SubmoduleTracer, again: SubmoduleTracer | None, before: Snapshot, noticed: _Noticed
) -> fx.Graph:
    """The graph of root as tracer follows it.

    again    traces once more, where near code may do something else each time; the graphs must be the same
    noticed  filled with what forward did beside that
    """
    rng = torch.get_rng_state()
    if (unclear := tracer.reached.why_unclear(root)) is not None:
        raise NotImplementedError(unclear)
    with computing_noted(root, tracer.reached.reads_dictionaries) as computed, buffers_kept(root):
        graph: fx.Graph = graph_of_recurrent(root, tracer.specialized) or tracer.trace(root)
    tracer.questions.settle()
    noticed.draws = not torch.equal(rng, torch.get_rng_state())
    noticed.changed, noticed.computed = before.changed(), computed
    if again is not None and not (noticed.draws or noticed.changed or tracer.questions.refused):
        with buffers_kept(root):
            second = again.trace(root)
        _refuse_another(graph, second, root)
    return graph


def _keep_created(graph: fx.Graph, traced_root: nn.Module, root: nn.Module) -> None:
    """Mark tensors that forward creates, which the tracer left on its root, and hand them over to root."""
    held = list(graph.find_nodes(op="get_attr"))
    created = [node for node in held if "." not in node.target and not hasattr(root, node.target)]
    for node in created:
        node.meta[CREATED] = True
    _refuse_writes_to_created(graph, traced_root)
    refuse_writes_beside_arrays(graph, traced_root)
    if created:
        _hand_over(created, traced_root, root)


def _assume_required(tracer: SubmoduleTracer, graph: fx.Graph, root: nn.Module) -> None:
    """Take for granted that arguments without a default are given, and not None."""
    named = {str(node.target) for node in graph.find_nodes(op="placeholder")} - tracer.specialized.keys()
    required = [p.name for p in forward_signature(root).parameters.values() if p.default is p.empty]
    tracer.questions.kinds.assume_given(name for name in required if name in named)


def _hand_over(created: Sequence[fx.Node], traced_root: nn.Module, root: nn.Module) -> None:
    """Put what the tracer left on its root on this one; what is a tensor of the model's own is no longer CREATED."""
    held = Held(traced_root, root)
    for name in {str(node.target) for node in created}:
        setattr(root, name, held.original(getattr(traced_root, name)))
    for node in created:
        if getattr(root, str(node.target)) is not getattr(traced_root, str(node.target)):
            del node.meta[CREATED]


def _assume_compared(tracer: SubmoduleTracer, graph: fx.Graph, root: nn.Module, specialized: Mapping[str, Any]) -> None:
    """Take for granted the classes of arguments that code compares by `is`: a traced value is none of its objects."""
    names = tracer.reached.compared_arguments(root.forward)
    for node in graph.find_nodes(op="placeholder"):
        name = str(node.target)
        if name.startswith("*") or name in specialized or not (names is None or name in names):
            continue
        kind = tracer.questions.kinds.of(node)
        if kind is None or not issubclass(kind, torch.Tensor | int | float | list | tuple | dict):
            tracer.questions.refused.setdefault(
                WHOLE, f"{name} is compared by `is`, and is neither a tensor nor a number"
            )


def _refuse_another(graph: fx.Graph, again: fx.Graph, root: nn.Module) -> None:
    """Raise where the forward gave another graph when it was traced again."""
    node = first_difference(graph, again, root)
    if node is not None:
        path = next(reversed(node.meta.get("nn_module_stack") or {WHOLE: None}))
        raise Untraceable({path: CHANGES}, (path,))


def _refuse_writes_to_created(graph: fx.Graph, root: nn.Module) -> None:
    """Raise where forward writes to a tensor that it makes: it was made, and perhaps read, once, while tracing."""
    for node in graph.nodes:
        if any(written.meta.get(CREATED) for written in writes(node, root, unknown=False)):
            path = next(reversed(node.meta.get("nn_module_stack") or {"": None}))
            raise Untraceable({path: "its forward writes to a tensor that it makes, which a graph makes once"})


def _settle_decisions(tracer: SubmoduleTracer, graph: fx.Graph, example: Mapping[str, Any]) -> None:
    """Let the example's answers stand for assertions, too.

    Raises Untraceable where its answers may be wrong, or led to a graph of very many operations.
    """
    if not decided(graph):
        return
    for node in graph.find_nodes(op="call_function", target=torch._assert):
        if isinstance(node.args[0], fx.Node) and tracer.questions.told(node.args[0], "bool") is True:
            graph.erase_node(node)
    if len(graph.nodes) > MOST_CALLS:
        raise Untraceable({WHOLE: f"the sizes of the example make it more than {MOST_CALLS} operations"})
    if sets_sizes_in_place(graph):
        raise Untraceable({WHOLE: "its forward asks for sizes, and changes sizes of a tensor in place"})
    settle(graph, tracer.root, example)
    make_constants(graph, tracer.root)


def refuse_writes_beside_arrays(graph: fx.Graph, root: nn.Module) -> None:
    """Raise where forward writes to a tensor in whose memory a numpy array lies: what is made of that is no node."""
    if not may_write_to_held(graph, root) or not (arrays := arrays_of(root)):
        return
    tensors = {target: get_attribute(root, target) for target in written_attributes(graph, root)}
    target_of = {id(value): target for target, value in tensors.items() if isinstance(value, torch.Tensor)}
    for group in shared([value for value in tensors.values() if isinstance(value, torch.Tensor)], arrays):
        for value in group:
            if id(value) in target_of:
                reason = f"its forward writes to {target_of[id(value)]}, in whose memory a numpy array lies"
                raise Untraceable({WHOLE: reason}, (WHOLE,))


def written_attributes(graph: fx.Graph, root: nn.Module) -> list[str]:
    """The names of what graph reads from root, and may write to."""
    gm = SkeletonModule(root)
    gm.graph = copy_graph(graph)
    aliasing = Aliasing(gm)
    return [str(node.target) for node in gm.graph.find_nodes(op="get_attr") if aliasing.is_written(node)]
