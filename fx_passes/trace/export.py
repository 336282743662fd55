"""torch.export as the second way to a graph: it follows the example inputs through control flow on shapes and values.

The graph keeps every size free that the model does not depend on, as far as torch.export can. What it does depend on is
collected as guards (fx_passes/trace/guards.py).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import logging
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.graph import _PyTreeCodeGen
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree

from fx_passes.aliasing.effects import GUARDS
from fx_passes.graph.graph import copy_graph, unique_name
from fx_passes.graph.hooks import computed_weights, without_hooks
from fx_passes.trace.asked import Asked, listening, sizes_written
from fx_passes.trace.assumptions import own_attributes
from fx_passes.trace.compared import apart
from fx_passes.trace.experts import call_grouped_products
from fx_passes.trace.fake_tensors import without_cache
from fx_passes.trace.guards import Guards
from fx_passes.trace.inline import inline_modes
from fx_passes.trace.modes import keep_modes_whole
from fx_passes.trace.one_thread import say_who_traces
from fx_passes.trace.orders import NotedOrders, drop_aliases
from fx_passes.trace.outputs import take_outputs_apart
from fx_passes.trace.padding import write_out_padding
from fx_passes.trace.quantized_layers import as_operators
from fx_passes.trace.quiet import kept_quiet
from fx_passes.trace.recurrent_sizes import lengths_free
from fx_passes.trace.seeding import refuse_seeding
from fx_passes.trace.sizes import ALL, Free, FreeSizes, TimeLeft, attempts
from fx_passes.trace.skeleton import Held, have_other_bytes, skeleton
from fx_passes.trace.state import Snapshot
from fx_passes.trace.time_limit import MOST_CALLS, MostCalls, TooLong, TooMany
from fx_passes.trace.written_out import read_weights, write_out_modules
from zendnn_cffi.errors import is_of_signal_handler

log = logging.getLogger("zendnn_cffi.passes")
aten = torch.ops.aten

_REASON = 200  # characters of its messages that are kept
_ASKS_FOR_DATA = "GuardOnDataDependentSymNode"  # other free sizes would not say what the numbers in a tensor are


def fill_tables_of_dynamo() -> None:
    """Let TorchDynamo, which torch.export asks, look up PyTorch's functions now, and not while others stand for some.

    It does so once in a process: torch.compile would not know those that were replaced meanwhile, and break graphs.
    """
    with contextlib.suppress(ImportError, AttributeError):  # what is not PyTorch's interface may be elsewhere
        from torch._dynamo import trace_rules

        trace_rules.get_torch_obj_rule_map()


class StateChanged(Exception):
    """The forward changes more than its result; torch.export itself would put it back and say nothing.

    changed  path of a module -> what of it
    """

    def __init__(self, changed: dict[str, str]) -> None:
        super().__init__("; ".join(f"{path or 'the model'}: {what}" for path, what in changed.items()))
        self.changed = changed


class ArgumentsChanged(Exception):
    """The forward changes a container that its caller has: torch.export gives it another."""


def is_exported(module: nn.Module) -> bool:
    """Whether module is what ExportedProgram.module() returns: a graph of operators alone, so of one mode for good."""
    if not isinstance(module, fx.GraphModule) or not isinstance(module.graph._codegen, _PyTreeCodeGen):
        return False
    return all(node.target == GUARDS for node in module.graph.find_nodes(op="call_module"))


def export(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: FreeSizes = ALL, left: TimeLeft | None = None
) -> tuple[fx.Graph, Guards]:
    """Return the graph of root (its constants are put on root) and the guards it rests on.

    sizes  which ones may be free; guards.sizes says which were when the time was over
    left   the time for following them; None: as for a model of its own
    A root that was exported before has both.
    Raises  StateChanged, and whatever torch.export raises for a model it cannot follow.
    """
    own: Any = root
    without_gradients, asked, held = False, None, Held(root, root)
    if is_exported(root):
        gm = _with_whole_modes(fx.GraphModule(root, copy_graph(own.graph)))
    else:
        if names := own_attributes((args, kwargs)):
            raise NotImplementedError(f"an example with a tensor that was given the attribute {names[0]}")
        left = left or TimeLeft()
        args, kwargs = apart((args, kwargs))
        program, without_gradients, asked, sizes, held = _export(root, args, kwargs, sizes, left)
        asked.refuse(root)
        gm = _with_whole_modes(program.module())
        gm.graph.eliminate_dead_code()
        if literal := read_weights(gm.graph):
            again = _export(root, args, kwargs, sizes, left, literal)
            sizes, held = again.sizes, again.held
            gm = _with_whole_modes(again.program.module())
    check = getattr(gm, GUARDS, None)
    inline_modes(gm)
    graph: fx.Graph = gm.graph
    drop_aliases(graph)
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target == GUARDS:
            graph.erase_node(node)
        elif node.op == "call_module":  # what is under a mode
            name = unique_name(root, "under_mode")
            root.add_module(name, gm.get_submodule(str(node.target)))
            node.target = name
        elif node.op == "get_attr":
            node.target = _constant_of_root(root, node.target, gm, held)
        elif node.op == "call_function" and node.target in (aten.detach.default, aten.detach_.default):
            _drop_detach(node)
    call_grouped_products(graph)
    return graph, Guards(check, (args, kwargs), without_gradients, asked, sizes)


def _drop_detach(node: fx.Node) -> None:
    """Let others than the result read what is detached: the guards keep gradients out. Results are other objects."""
    for user in list(node.users):
        if user.op != "output" or node.target is aten.detach_.default:
            user.replace_input_with(node, node.args[0])
    if not node.users:
        node.graph.erase_node(node)


def _constant_of_root(root: nn.Module, target: str, gm: fx.GraphModule, held: Held) -> str:
    """The name under which root has what gm has under `target`; a tensor that forward creates is put there."""
    path, _, name = target.rpartition(".")
    value = getattr(gm.get_submodule(path), name)
    try:
        owner = root.get_submodule(path)
    except AttributeError:  # layers[:2].0: root has no such module
        owner, path, target = root, "", name
    if hasattr(owner, name):
        # torch.export numbers such tensors from 0 on in every graph: another graph of this root may have one
        mine = owner.__dict__.get(name)
        if not isinstance(mine, torch.Tensor) or held.original(value) is mine:
            return target
        if (mine.shape, mine.dtype) == (value.shape, value.dtype) and not have_other_bytes(mine, value):
            return target
        name = unique_name(owner, name)
    setattr(owner, name, held.original(value))
    return f"{path}.{name}" if path else name


def _with_whole_modes(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph, before dead code leaves it: nobody reads the calls that enter modes, so these look dead."""
    keep_modes_whole(gm, gm.graph)
    return gm


class _Exported(NamedTuple):
    """An exported program, and what it rests on, as Guards have it."""

    program: Any
    without_gradients: bool
    asked: Asked
    sizes: FreeSizes
    held: Held  # what root has in place of constants that lie in the copy that was exported


def _export(
    root: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sizes: FreeSizes,
    left: TimeLeft,
    literal: Collection[str] = (),
) -> _Exported:
    """The exported program with as many sizes free as can be.

    Sizes are given up step by step: those that torch.export cannot follow, and those that take too long.

    literal  paths of attention modules that are exported as PyTorch writes them

    Gradients are off, so that the model's own no_grad() leaves no trace in the graph.
    """
    because = ""
    for attempt in attempts():
        if attempt.free > sizes.free:
            continue
        traced_root = without_hooks(skeleton(root, own_state=True))
        write_out_modules(traced_root, literal)  # first: the root may be one of these
        take_outputs_apart(traced_root)
        padded = write_out_padding(traced_root)
        shared = Snapshot(traced_root)
        if once := shared.unrepeatable():
            raise StateChanged(once)
        noticed = _watch_state(traced_root)
        _name_keywords(traced_root, kwargs)
        asked = Asked()
        marks = [(x, set(x.__dict__)) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        try:
            shapes = attempt.shapes(traced_root, (args, kwargs))
            hearing, limit, quietly = asked.heard(), left.limit(attempt.free), warnings.catch_warnings()
            with torch.no_grad(), _followed(traced_root, attempt.mode), hearing, limit, quietly, kept_quiet():
                for told in (".*assigned during export", ".*certain side effects"):  # of modes that are around forward
                    warnings.filterwarnings("ignore", message=told, category=UserWarning)
                program = torch.export.export(traced_root, args, kwargs, dynamic_shapes=shapes, strict=False)
                if attempt.free < sizes.free:
                    sizes = sizes._replace(free=attempt.free, because=because)
                return _Exported(program, bool(padded), asked, sizes, Held(traced_root, root))
        except ArgumentsChanged:
            raise
        except TooMany as error:
            raise RuntimeError(str(error)) from None
        except TooLong:
            sizes = sizes.fewer()
            log.info("torch.export with %s free: %s", attempt.what, sizes.because)
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            if noticed:
                raise StateChanged(noticed) from error
            if attempt.free is Free.NOTHING:
                raise
            because = f"{type(error).__name__}: {error}".partition("\n")[0][:_REASON]
            log.info("torch.export with %s free: %s", attempt.what, because)
            if type(error).__name__ == _ASKS_FOR_DATA:
                sizes = sizes._replace(free=Free.NOTHING, because=because)
        finally:
            shared.restore_shared()
            for tensor, before in marks:  # torch.export notes on them which sizes are free
                for name in tensor.__dict__.keys() - before:
                    del tensor.__dict__[name]
    raise AssertionError("the last attempt returns or raises")


def _watch_state(root: nn.Module) -> dict[str, str]:
    """Return a mapping that root's forward, called later, fills with the modules it changes."""
    forward, noticed = root.forward, dict[str, str]()

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        say_who_traces()
        held = [*_held_by((args, kwargs))]
        before = Snapshot(root, in_place=False)  # what is written in place is in the graph
        usual = {*own_attributes((args, kwargs))}  # those of fake tensors
        with NotedOrders(), MostCalls(MOST_CALLS), listening(), _computed_weights_kept(root):
            result = forward(*args, **kwargs)
        noticed.update(before.changed())
        if usual and (given := {*own_attributes((args, kwargs, result))} - usual):
            noticed[""] = f"its forward gives a tensor the attribute {min(given)}"
        if noticed:
            raise StateChanged(noticed)
        now = [*_held_by((args, kwargs))]
        if len(now) != len(held) or any(a is not b for a, b in zip(now, held, strict=True)):
            raise ArgumentsChanged("its forward changes a list or dictionary among its arguments")
        return result

    root.forward = watched
    return noticed


@contextlib.contextmanager
def _computed_weights_kept(root: nn.Module) -> Iterator[None]:
    """Take back the weights that hooks set, as of weight_norm: they are in the graph, and no state of the model."""
    kept = [
        (module.__dict__, name, module.__dict__[name])
        for module in root.modules()
        for name in computed_weights(module)
        if name in module.__dict__
    ]
    try:
        yield
    finally:
        for held, name, value in kept:
            held[name] = value


def _held_by(value: Any) -> Iterator[Any]:
    """Python's own containers among arguments, their keys, and what else they hold."""
    if type(value) in (list, dict, tuple, collections.deque):
        for item in (*value, *value.values()) if type(value) is dict else value:
            yield from _held_by(item)
        yield len(value)
    else:
        yield value


def _name_keywords(root: nn.Module, names: Iterable[str]) -> None:
    """Let forward(**masks) say that it takes these names: torch.export loses free sizes of what is in **masks."""
    forward: Any = root.forward
    signature = inspect.signature(forward)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(own) < len(signature.parameters):
        others = [name for name in names if name not in signature.parameters]
        named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in others]
        forward.__signature__ = signature.replace(parameters=[*own, *named])


@contextlib.contextmanager
def _followed(root: nn.Module, mode: AbstractContextManager[Any]) -> Iterator[None]:
    """In the mode of an attempt, what holds while torch.export follows root: it does what it does in eager."""
    with written_out(), refuse_seeding(), sizes_written(), mode, without_cache(), lengths_free(), as_operators(root):
        yield


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """Let nn.MultiheadAttention and nn.TransformerEncoderLayer call their parts, not one operator for all of them.

    A mask given without is_causal is a mask: PyTorch looks whether it is causal, which changes no number.
    """
    enabled, detect = torch.backends.mha.get_fastpath_enabled(), transformer._detect_is_causal_mask
    torch.backends.mha.set_fastpath_enabled(False)
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect
        torch.backends.mha.set_fastpath_enabled(enabled)
