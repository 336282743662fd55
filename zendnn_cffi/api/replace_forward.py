"""replace_forward(): a model that something else holds computes by optimized modules from now on."""

from __future__ import annotations

import inspect
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fx_passes.plain_calls import Reasons
from zendnn_cffi.api.model_states import EarlierStates, ModelState, sample_of
from zendnn_cffi.api.optimize import made, optimize
from zendnn_cffi.collector import collector_paused
from zendnn_cffi.errors import is_of_signal_handler
from zendnn_cffi.locks import new_lock
from zendnn_cffi.log import get_logger
from zendnn_cffi.primitives.ambient import is_watched, watcher
from zendnn_cffi.runtime.uncompiled import keep_uncompiled, set_dynamo_hook

if TYPE_CHECKING:
    from fx_passes.model_watch import ModelWatch
    from fx_passes.module import OptimizedModule
    from fx_passes.trace.traced import Traced

log = get_logger(__name__)
_TRIES = 3  # to optimize: a model that is refused that often stays plain PyTorch


class ReplacedForward:
    """What stands in a model's `forward`; see replace_forward().

    The first call optimizes the model; that module has graphs for the kinds of calls that come (fx_passes.call_kinds).
    """

    stands_in = True  # explain() and profile() look behind it
    is_of_class = True  # what it computes is the forward of the model's class: fx_passes.graph.hooks

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self.model, self.options = model, options
        self._reasons = Reasons()
        self._fast: OptimizedModule | None = None
        self._refused = 0  # so many times
        self._looked_at: list[Traced] = []  # that change nothing of their own
        self._watch: ModelWatch | None = None  # the model as it was optimized
        self._sample: list[Any] = []  # of its numbers then
        self._seen: ModelWatch | None = None  # as the last call found it, where that is another
        self._seen_calls = 0
        self._earlier = EarlierStates()
        self._lock = new_lock()
        self.__signature__ = inspect.signature(type(model).forward.__get__(model))  # generate() and pipelines read it
        self.__code__ = getattr(type(model).forward, "__code__", None)  # torch.export reads where it is written

    @property
    def modules(self) -> list[OptimizedModule]:
        """The optimized modules: of the model, and for further kinds of calls that came."""
        return [] if self._fast is None else [self._fast, *self._fast.call_kinds.modules]

    @property
    def reasons(self) -> list[str]:
        """Why the last calls that stayed plain PyTorch did."""
        return [*self._reasons.texts, *([] if self._fast is None else self._fast.call_kinds.reasons.texts)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from fx_passes.graph.hooks import set_computed_weights

        hook = set_dynamo_hook(None)  # it cannot follow what tells a change
        try:
            fast = self._found(args, kwargs)
            if fast is not None:
                set_computed_weights(fast, args)
                return fast.forward(*args, **kwargs)  # the model's hooks run around this one
        finally:
            set_dynamo_hook(hook)
        return type(self.model).forward(self.model, *args, **kwargs)

    keep_uncompiled(__call__, "a replaced forward runs programs of ZenDNN")

    def _found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OptimizedModule | None:
        """The module for such a call, made where it is the first one."""
        from fx_passes.first_call import no_example
        from fx_passes.graph.hooks import outputs_are_collected

        if self.model.training:
            return self._plain("the model is in training mode")
        if is_watched():  # a tracer finds the model's own parameters, and no others
            return self._plain(f"{watcher()} looks at each operation")
        if reason := no_example(args, kwargs):  # a cache, say, which the call may write to
            return self._plain(reason)
        with self._lock:
            if self._watch is None and any(map(is_lazy, (*self.model.parameters(), *self.model.buffers()))):
                return self._plain("its first call gives parameters their shapes")
            if not self._is_settled():
                return self._plain("the model was changed: the next call optimizes it anew, unless it changes again")
            if self._fast is None and self._refused == _TRIES:
                return None
            try:
                fast = self._fast = self._fast or self._made()
            except Exception as error:
                if is_of_signal_handler(error):
                    raise
                self._refused += 1
                return self._plain(f"optimize() refused it: {type(error).__name__}: {error}")
            if fast._awaits_call and not outputs_are_collected():  # what calls change is known afterwards
                fast.trace_by(args, kwargs)
                if fast._awaits_call:
                    return self._plain("no graph can be made of it: the next call is tried")
            every = [module._source[0] for module in self.modules]
            is_known = len(every) == len(self._looked_at) and all(map(operator.is_, every, self._looked_at))
            if not is_known and (state := _own_state(self.model, fast)):
                self._fast, self._refused = None, _TRIES
                return self._plain(f"its forward changes {state}, which whoever has the model may read and set")
            self._looked_at = every
            return fast

    def _is_settled(self) -> bool:
        """Whether the modules are of the model as it is; made anew where it stayed for two calls, or taken again."""
        from fx_passes.model_watch import ModelWatch

        if self._watch is not None and self._watch.unchanged():
            self._seen = None
            return True
        if self._watch is not None:
            earlier = self._earlier.taken(self.model)
            if earlier is None and not (self._seen is not None and self._seen.unchanged()):
                self._seen, self._seen_calls = ModelWatch(self.model), 0
            self._seen_calls += 1
            if earlier is None and self._seen_calls <= self._earlier.wait:
                return False
            self._earlier.add(ModelState(self._watch, self._fast, self._refused, self._sample))
            if earlier is not None:
                self._watch, self._fast, self._refused = earlier.watch, earlier.fast, earlier.refused
                self._sample, self._seen = earlier.sample, None
                return True
        self._fast, self._refused, self._sample = None, 0, sample_of(self.model)
        self._watch, self._seen = self._seen or ModelWatch(self.model), None
        return True

    def _made(self) -> OptimizedModule:
        """The module, which is traced by the call that comes where that tells more."""
        held = self.model.__dict__.pop("forward")  # it is the model itself that is optimized
        try:
            with torch.inference_mode(False), torch.no_grad(), collector_paused():
                fast: Any = made(self.model, **self.options)
        finally:
            self.model.__dict__["forward"] = held  # this, or what others put around it
        fast.write_first_by(None)  # whoever has the model reads what calls write
        return fast

    def _plain(self, reason: str) -> OptimizedModule | None:
        if self._reasons.add(reason):
            log.info("%s: a call stays plain PyTorch: %s", type(self.model).__name__, reason)
        return None

    def invalidate(self) -> None:
        """Let the next call optimize the model anew, as it is then.

        Needed after what PyTorch does not count, as OptimizedModule.invalidate(): writes through .data or numpy, other
        numbers in large arrays and dictionaries among attributes.
        """
        with self._lock:
            self._fast, self._watch, self._looked_at, self._seen = None, None, [], None
            self._earlier = EarlierStates()

    def undo(self) -> None:
        """Give the model its own forward back. Doing so twice is allowed."""
        if self.model.__dict__.get("forward") is self:
            del self.model.__dict__["forward"]

    def __reduce__(self) -> Any:
        """Copies begin anew: they optimize on their first calls."""
        return _again, (), {"model": self.model, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _own_state(model: nn.Module, fast: OptimizedModule) -> str:
    """What calls of the optimized module change in memory of its own: the model would neither see it nor reset it."""
    from fx_passes.trace.scripted import sets_attributes

    if changing := [path for each in (fast, *fast.call_kinds.modules) for path in each._source[0].stateful]:
        return ", ".join(path or "attributes" for path in dict.fromkeys(changing[:4]))
    if scripted := [path for path, module in model.named_modules() if sets_attributes(module)]:
        return f"attributes of {scripted[0]}, a ScriptModule"
    theirs = {**dict(fast._tree.named_parameters()), **dict(fast._tree.named_buffers())}
    own = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if (other := theirs.get(name)) is not None and _is_elsewhere(tensor, other)
    ]
    return ", ".join(own[:4])


def _is_elsewhere(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    is_plain = all(type(each) in (torch.Tensor, nn.Parameter) for each in (tensor, other))  # others may have no memory
    return is_plain and tensor.layout is torch.strided and tensor.data_ptr() != other.data_ptr()


def _again() -> ReplacedForward:
    return ReplacedForward.__new__(ReplacedForward)


def replace_forward(model: nn.Module, **options: Any) -> ReplacedForward:
    """Let a model compute by optimized modules wherever it is called, and return what undoes that.

    For a model that something else holds: a Hugging Face pipeline, a Trainer, a SentenceTransformer. The model keeps
    its class, attributes, configuration, state_dict and methods (generate(), say). `model.forward = fast` does not do
    this: PyTorch makes a submodule of it, which nothing calls.

    model    in evaluation mode when it is called; in training mode it computes as before. Layers, hooks and attributes
             that are replaced or set later are noticed: that call stays plain PyTorch, and the next one optimizes anew
    options  of optimize(): dynamic, dtype, tune, tune_seconds, allow_winograd. release_weights needs optimize() itself.
    Returns  ReplacedForward, which is `model.forward` now: undo() gives the model its own forward back, invalidate()
             optimizes it anew after writes through .data, explain() and profile() take the model. Each kind of call
             (names, dtypes, dimensions, numbers) has a graph once it came, at most 8 of them, as optimize() has it.
             Calls with other things than tensors, numbers and containers of these stay plain PyTorch, such as caches,
             which a call writes to, as do models whose forward is seen to change their own state; `reasons` names
             them. As of optimize(), outputs carry no gradient for parameters, unless an argument asks for one: train in
             training mode, or after undo().
    Raises   TypeError for what is no module or was optimized already, and for unknown options; ValueError where forward
             was replaced before
    """
    from fx_passes.module import OptimizedModule

    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule | OptimizedModule):
        raise TypeError(f"model must be a torch.nn.Module in eager mode, got {type(model).__name__}")
    allowed = set(inspect.signature(optimize).parameters) - {"model", "example_inputs", "release_weights"}
    if unknown := options.keys() - allowed:
        raise TypeError(f"replace_forward() takes {', '.join(sorted(allowed))}; not {', '.join(sorted(unknown))}")
    if "forward" in model.__dict__:
        if isinstance(model.__dict__["forward"], ReplacedForward):
            raise ValueError(f"the forward of this {type(model).__name__} was replaced before: call its undo()")
        raise ValueError(
            f"the forward of this {type(model).__name__} was replaced before, not by zendnn_cffi: replace it first,"
            " and let others (accelerate's hooks, mixed precision) wrap the model then, or give the model to optimize()"
        )
    made = ReplacedForward(model, options)
    model.__dict__["forward"] = made
    return made
