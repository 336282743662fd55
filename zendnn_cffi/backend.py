"""torch.compile(model, backend="zendnn"): the graphs that TorchDynamo captures, through the same passes as optimize().

    dynamo graph (torch functions; parameters, sizes and floats are inputs of it)
      -> bind       parameters, buffers and floats of this call become constants of the graph; sizes follow from tensors
      -> fx_passes  normalize, fold, fuse, partition, regions: as in optimize()

A bound graph is right for the tensors it was bound to. Each call checks that they are the same objects with the same
contents (identity, version counter, address), and binds again where they are not: two layers of one class may share a
captured graph, and parameters may be loaded or moved between calls.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from zendnn_cffi.api.optimize import DTYPES, TUNE_MODES, as_seconds, kept_choices
from zendnn_cffi.engine.library import is_available, unavailable_reason
from zendnn_cffi.locks import new_lock
from zendnn_cffi.log import get_logger

log = get_logger(__name__)
# Graphs bound to different parameters that one captured graph keeps at first: one for each layer that shares it.
MAX_BINDINGS = 64
_MAX_CHANGES = 4  # a tensor whose contents changed this often is an input, not a constant
_OPTIONS = {"dtype", "allow_winograd", "tune", "tune_seconds"}
_warned: set[str] = set()


def compiled_modules() -> list[fx.GraphModule]:
    """Return the optimized modules that live behind torch.compile, oldest first: explain() takes each of them."""
    from fx_passes.report import compiled

    return [*compiled.compiled_modules()]


def zendnn_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Return a callable that computes gm; registered as the backends "zendnn" and "zendnn_cffi" of torch.compile.

    options  torch.compile(..., options={"dtype": torch.bfloat16, "tune": "off", "allow_winograd": True,
             "tune_seconds": 1.0}): as in optimize()
    Graphs that train, or whose inputs require gradients, run as plain PyTorch, with one warning.
    """
    options = _checked(dict(kwargs.get("options") or {}))
    if not is_available():
        _warn_once(f"torch.compile runs plain PyTorch: {unavailable_reason()}")
        return gm.forward
    if is_training(gm):
        _warn_once("a module in training mode runs as plain PyTorch under torch.compile: call model.eval() first")
        return gm.forward
    return CompiledGraph(gm, options)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise ValueError(f"unknown options {unknown} for the zendnn backend: it takes {sorted(_OPTIONS)}")
    if options.get("dtype") not in DTYPES:
        raise ValueError(f"dtype must be torch.float32, torch.bfloat16 or None, got {options['dtype']!r}")
    if options.get("tune", "auto") not in TUNE_MODES:
        raise ValueError(f"tune must be one of {', '.join(map(repr, TUNE_MODES))}, got {options['tune']!r}")
    return options | {"tune_seconds": as_seconds(options["tune_seconds"])} if "tune_seconds" in options else options


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"zendnn_cffi: {message}", RuntimeWarning, stacklevel=3)


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


def is_training(gm: fx.GraphModule) -> bool:
    """Whether the graph has operations in training mode (dropout that drops, running statistics that are updated).

    Batch statistics alone are no sign of it: networks standardize their weights by them.
    """
    from fx_passes.graph.graph import argument

    def trains(node: fx.Node) -> bool:
        if node.target in _DROPOUTS:
            return argument(node, 2, "training", True) is True and bool(argument(node, 1, "p", 0.5))
        statistics = node.target is F.batch_norm and argument(node, 1, "running_mean") is not None
        return statistics and argument(node, 5, "training", False) is True

    return any(node.op == "call_function" and trains(node) for node in gm.graph.nodes)


def _require_gradients(args: Sequence[Any]) -> bool:
    return any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)


def run_captured(captured: fx.GraphModule, *args: Any) -> Any:
    """Run what was captured as plain PyTorch.

    Forward of a lazy module calls the module at first, which prints the errors that it raises.
    """
    generate = getattr(captured, "real_recompile", None)
    if generate is not None:
        generate()
    return captured.forward(*args)


class CompiledGraph:
    """A captured graph, bound on demand to the parameters it is called with."""

    def __init__(self, gm: fx.GraphModule, options: dict[str, Any]) -> None:
        from fx_passes.graph.graph import copy_graph
        from fx_passes.trace.modes import turns_gradients_on

        self.captured = gm
        self._by_pytorch = functools.partial(run_captured, gm)  # as it was captured
        self.gm = gm = fx.GraphModule(gm, copy_graph(gm.graph))
        self.options = options
        prepare(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.floats = [i for i, node in enumerate(placeholders) if is_float(node)]
        self.constants = [i for i, node in enumerate(placeholders) if is_static(node)]
        of_layers = {node for pair in running_statistics(gm) for node in pair}
        self._of_layers = {i for i in self.constants if placeholders[i] in of_layers}
        self._turns_gradients_on = turns_gradients_on(gm)
        self._changes = dict.fromkeys(self.constants, 0)
        self._bindings: OrderedDict[tuple[Any, ...], Binding] = OrderedDict()
        self._latest: Binding | None = None
        self._limit = MAX_BINDINGS
        self._let_go = WeakIdKeyDictionary()  # constants of bindings that had to go
        self._lock = new_lock()
        self._binding_in = 0  # the thread that does

    def __call__(self, *args: Any) -> Any:
        """Run the graph on dynamo's inputs; parameters are among them."""
        if (torch.is_grad_enabled() or self._turns_gradients_on) and _require_gradients(args):
            advice = "call the model under torch.no_grad()" if torch.is_grad_enabled() else "forward turns them on"
            _warn_once(f"gradients are required, so this runs as plain PyTorch: {advice}")
            return self._by_pytorch(*args)
        if torch.is_autocast_enabled("cpu"):  # other dtypes than the passes know
            return self._by_pytorch(*args)
        binding = self._latest
        if binding is None or not binding.matches(args):
            binding = self._bind(args)
            if binding is None:
                return self._by_pytorch(*args)
        return binding(args)

    def _bind(self, args: Sequence[Any]) -> Binding | None:
        """The binding for these arguments, made if there is none; None where floats change all the time."""
        with self._lock:
            if self._binding_in == threading.get_ident():  # a finalizer or signal handler, in the midst of binding
                return None
            self._binding_in = threading.get_ident()
            try:
                return self._bound(args)
            finally:
                self._binding_in = 0

    def _bound(self, args: Sequence[Any]) -> Binding | None:
        self._leave_unseen(args)
        floats = tuple(digits(args, self.floats))
        key = (floats, *(id(args[i]) for i in self.constants))
        binding = self._bindings.get(key)
        if binding is not None and not binding.matches(args):
            self._note_changes(binding, args)
            self._bindings.pop(key, None)
            key, binding = (floats, *(id(args[i]) for i in self.constants)), None
        if binding is None:
            self._leave_fresh()
            key = (floats, *(id(args[i]) for i in self.constants))
            if len({k[0] for k in self._bindings}) > _MAX_CHANGES:
                return None
            binding = Binding(self.gm, args, self.constants, self.floats, self.options, self._by_pytorch)
            self._make_room(args)
            self._bindings[key] = binding
        self._bindings.move_to_end(key)
        self._latest = binding
        return binding

    def _make_room(self, args: Sequence[Any]) -> None:
        """Let the oldest bindings go, or keep more where their constants come back: more layers share the graph."""
        if len(self._bindings) >= self._limit and all(args[i] in self._let_go for i in self.constants):
            self._limit *= 2
        while len(self._bindings) >= self._limit:
            _, oldest = self._bindings.popitem(last=False)
            self._let_go.update(dict.fromkeys(oldest.constants))

    def _leave_unseen(self, args: Sequence[Any]) -> None:
        """Writes to inference tensors count no version up: those that are no parameters of layers are inputs."""
        for i in [i for i in self.constants if i not in self._of_layers and args[i].is_inference()]:
            if not isinstance(args[i], nn.Parameter):
                self.constants.remove(i)
                self._bindings.clear()

    def _leave_fresh(self) -> None:
        """Let bindings go whose constants nobody else has any longer; those that are others in each call are inputs."""
        gone = {key: indices for key, binding in self._bindings.items() if (indices := binding.abandoned())}
        for key, indices in gone.items():
            is_fresh = self._bindings.pop(key).calls == 1
            for i in indices:
                self._changes[i] = self._changes[i] + 1 if is_fresh else 0
        if fresh := [i for i in self.constants if self._changes[i] >= _MAX_CHANGES]:
            self.constants = [i for i in self.constants if i not in fresh]
            self._bindings.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledGraph:
        """TorchDynamo's minifier copies what it runs, and asks it for parameters: those are inputs here."""
        return CompiledGraph(copy.deepcopy(self.captured, memo), dict(self.options))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.gm.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.gm.named_buffers()

    def _note_changes(self, binding: Binding, args: Sequence[Any]) -> None:
        """Tensors whose contents keep changing (a cache that is written in place) become inputs."""
        for i in binding.changed(args):
            self._changes[i] += 1
            if self._changes[i] >= (_MAX_CHANGES if isinstance(args[i], nn.Parameter) else 1):
                self.constants.remove(i)
                self._bindings.clear()


class Binding:
    """The optimized module for one set of constants."""

    def __init__(
        self,
        gm: fx.GraphModule,
        args: Sequence[Any],
        constants: Sequence[int],
        floats: Sequence[int],
        options: dict[str, Any],
        by_pytorch: Callable[..., Any],
    ) -> None:
        from fx_passes.aliasing.inputs import Places
        from fx_passes.changes import Contents, counters_of
        from fx_passes.pipeline import build
        from fx_passes.region.options import TUNE_SECONDS, RegionOptions, computes_in
        from fx_passes.region.region import RegionFactory
        from fx_passes.report.compiled import register
        from fx_passes.report.debug_folder import captured_by_dynamo
        from fx_passes.trace.refusals import CAPTURED, Refusals
        from fx_passes.trace.traced import Traced

        self.calls = 0
        self._others = [sys.getrefcount(args[i]) for i in constants]  # who have these constants
        self._own: list[int] = []
        self._indices = tuple(constants)
        self._contents = Contents(args[i] for i in constants)
        self._counters = Contents(counters_of(statistics(gm, args, constants)))
        self._float_indices = tuple(floats)
        self._floats = digits(args, floats)
        fixed = {*constants, *floats}
        self._inputs = tuple(i for i in range(len(args)) if i not in fixed)
        region = RegionOptions(
            computes_in(options.get("dtype")),
            options.get("allow_winograd", True),
            options.get("tune", "auto"),
            tune_seconds=options.get("tune_seconds", TUNE_SECONDS),
        )
        with torch.no_grad(), captured_by_dynamo():
            root, graph = bind(gm, args, constants, floats)
            self.module = build(Traced(root, graph), make_region=RegionFactory(region, kept_choices(region.tune)))
            self._refusals = Refusals.of(root, graph, CAPTURED)
        self._by_pytorch = by_pytorch
        self._written = self.module.written_inputs
        of_written = [] if self._written is None else self._written.tensors_of(self.module)
        self._places = Places(self._contents.tensors), Places(of_written)
        self._forward = self.module.run_graph  # what it is bound to was compared before the call
        register(self, self.module)
        log.debug("bound a graph of %d nodes to %d constants", len(graph.nodes), len(constants))

    def __call__(self, args: Sequence[Any]) -> Any:
        self.calls += 1
        result = self._run(args)
        if self.calls == 1:
            now = [sys.getrefcount(args[i]) for i in self._indices]
            self._own = [count - before for count, before in zip(now, self._others, strict=True)]
        return result

    def _run(self, args: Sequence[Any]) -> Any:
        inputs = [args[i] for i in self._inputs]
        if self._written is not None and self._written.are_shared(inputs, {}, *self._places):
            return self._by_pytorch(*args)
        if self._refusals is not None and not self._refusals.allow_flat(inputs):
            return self._by_pytorch(*args)
        try:
            return self._forward(*inputs)
        except Exception as error:
            if not self.module.may_run_again(error):
                raise
        return self._by_pytorch(*args)

    @property
    def constants(self) -> list[torch.Tensor]:
        return self._contents.tensors

    def matches(self, args: Sequence[Any]) -> bool:
        """Whether the constants are those among args, unchanged."""
        return (
            all(args[i] is t for i, t in zip(self._indices, self._contents.tensors, strict=True))
            and self._contents.unchanged()
            and self._counters.unwritten()
            and digits(args, self._float_indices) == self._floats
        )

    def abandoned(self) -> list[int]:
        """The indices of constants that nothing but this refers to; none before the first call is over."""
        tensors = self._contents.tensors
        return [self._indices[k] for k, own in enumerate(self._own) if sys.getrefcount(tensors[k]) <= own + 1]

    def changed(self, args: Sequence[Any]) -> list[int]:
        """The indices of constants whose contents changed."""
        written, tensors = self._contents.changed(), self._contents.tensors
        return [self._indices[k] for k in written if args[self._indices[k]] is tensors[k]]


def digits(args: Sequence[Any], floats: Sequence[int]) -> list[str]:
    """All digits of floats: -0.0 == 0.0, and a NaN is not itself."""
    return [args[i].item().hex() for i in floats]


def running_statistics(gm: fx.GraphModule) -> list[tuple[Any, Any]]:
    """What batch normalizations have as mean and variance."""
    from fx_passes.graph.graph import argument

    of_layers = gm.graph.find_nodes(op="call_function", target=F.batch_norm)
    return [(argument(node, 1, "running_mean"), argument(node, 2, "running_var")) for node in of_layers]


def statistics(gm: fx.GraphModule, args: Sequence[Any], constants: Sequence[int]) -> list[torch.Tensor]:
    """The constants that are running means of batch normalizations."""
    means = {mean for mean, _ in running_statistics(gm)}
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [args[i] for i in constants if placeholders[i] in means]


def is_static(node: fx.Node) -> bool:
    """Whether a placeholder is a parameter or buffer of the model, and not written by the graph."""
    from fx_passes.graph.quantized_tensors import is_understood

    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or is_float(node):
        return False
    owned = isinstance(example, nn.Parameter) or "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
    return owned and (not is_subclass(example) or is_understood(example)) and not example.is_meta


def is_subclass(tensor: torch.Tensor) -> bool:
    """Whether the example of an input is of a type of its own (quantized, distributed), not a plain tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(tensor) not in (torch.Tensor, nn.Parameter, FakeTensor, nn.Buffer)


def is_float(node: fx.Node) -> bool:
    """Whether a placeholder is a Python float that dynamo wrapped: a number that only item() reads."""
    example = node.meta.get("example_value")
    return (
        isinstance(example, torch.Tensor)
        and example.dtype == torch.float64
        and example.ndim == 0
        and bool(node.users)
        and all(user.op == "call_method" and user.target == "item" for user in node.users)
    )


def prepare(gm: fx.GraphModule) -> None:
    """Note what dynamo knows of every value where the passes look for it; erase what computes nothing; write out what
    is one call of much.
    """
    from fx_passes.trace.experts import call_grouped_products
    from fx_passes.trace.written_out import write_out

    for node in list(gm.graph.nodes):
        if "example_value" in node.meta:
            node.meta["val"] = node.meta["example_value"]
        if node.op == "call_function" and node.target is torch._C._log_api_usage_once and not node.users:
            gm.graph.erase_node(node)
    write_out(gm)
    call_grouped_products(gm.graph)
    gm.recompile()


def bind(
    gm: fx.GraphModule, args: Sequence[Any], constants: Sequence[int], floats: Sequence[int]
) -> tuple[nn.Module, fx.Graph]:
    """Return a module that owns the constants, and gm's graph over it, with the other inputs alone."""
    from fx_passes import ops
    from fx_passes.graph.graph import copy_graph
    from fx_passes.trace.modes import keep_modes_whole

    root = nn.Module()
    root.training = False
    for name, child in gm.named_children():
        root.add_module(name, child)
    for node in gm.graph.find_nodes(op="get_attr"):
        if "." not in node.target and not hasattr(root, node.target):
            setattr(root, node.target, getattr(gm, node.target))
    graph = copy_graph(gm.graph)
    graph.set_codegen(fx.graph.CodeGen())
    placeholders = graph.find_nodes(op="placeholder")
    for i in constants:
        node, value = placeholders[i], args[i]
        name = _name(root, node.name)
        if isinstance(value, nn.Parameter):
            root.register_parameter(name, value)
        else:
            root.register_buffer(name, value)
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        constant.meta["val"] = value
        node.replace_all_uses_with(constant)
        graph.erase_node(node)
    for i in floats:
        node, number = placeholders[i], args[i].item()
        for user in list(node.users):
            user.replace_all_uses_with(number)
            graph.erase_node(user)
        graph.erase_node(node)
    for node, (tensor, dim) in _sizes(graph).items():
        with graph.inserting_after(_last_placeholder(graph)):
            size = graph.call_function(ops.size, (tensor, dim))
        size.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(size)
    keep_modes_whole(root, graph)
    return root, graph


def _sizes(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, int]]:
    """Placeholders that are sizes -> (tensor input, dimension) of that size."""
    found: dict[str, tuple[fx.Node, int]] = {}
    placeholders = graph.find_nodes(op="placeholder")
    for node in placeholders:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    found.setdefault(str(size.node.expr), (node, dim))
    sizes = {}
    for node in placeholders:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and node.users and str(value.node.expr) in found:
            sizes[node] = found[str(value.node.expr)]
    return sizes


def _last_placeholder(graph: fx.Graph) -> fx.Node:
    return list(graph.find_nodes(op="placeholder"))[-1]


def _name(root: nn.Module, wanted: str) -> str:
    name, number = wanted, 0
    while hasattr(root, name):
        number += 1
        name = f"{wanted}_{number}"
    return name


def register() -> None:
    """Make the backend names known to torch.compile where the package is not installed (its entry points do that)."""
    from torch._dynamo.backends import registry

    for name in ("zendnn", "zendnn_cffi"):
        if name not in registry._COMPILER_FNS:
            registry.register_backend(zendnn_backend, name=name)
