"""Conditions on the arguments of a call under which an exported graph computes what the model would.

torch.export checks sizes. Whatever else its graph takes for granted of the example's arguments is compared here: their
structure, dtypes, ranks and numbers, and what the forward asked of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx._pytree import tree_flatten_spec
from torch.utils import _pytree as pytree

from fx_passes.trace.asked import Asked, arrangement, part_in_gradients
from fx_passes.trace.assumptions import own_attributes
from fx_passes.trace.conditions import Conditions, conditions_of
from fx_passes.trace.quiet import structures_copied
from fx_passes.trace.sizes import ALL, FreeSizes

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


class Arguments(NamedTuple):
    """Example inputs by position and by name at once."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _TensorLike(NamedTuple):
    """What a graph takes for granted of a tensor input, other than sizes; None where it does not depend on it."""

    dtype: torch.dtype
    device: torch.device
    ndim: int
    is_parameter: bool = False
    arrangement: tuple[Any, ...] | None = None
    part_in_gradients: tuple[bool, ...] | None = None
    is_bare: bool = False

    @classmethod
    def of(cls, value: torch.Tensor, asked: Asked | None) -> _TensorLike:
        """What a graph takes for granted whose forward asked this of its tensors."""
        return cls(
            value.dtype,
            value.device,
            value.ndim,
            type(value) is nn.Parameter,
            arrangement(value) if asked and asked.strides else None,
            part_in_gradients(value) if asked and asked.gradients else None,
            is_bare=asked is not None,
        )

    def describes(self, value: Any, may_ask: bool) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.dtype == self.dtype
            and value.device == self.device
            and value.layout is torch.strided
            and not value.is_nested
            and value.ndim == self.ndim
            and (type(value) is nn.Parameter) == self.is_parameter
            and (may_ask or not (value.requires_grad and torch.is_grad_enabled()))
            and (self.arrangement is None or arrangement(value) == self.arrangement)
            and (self.part_in_gradients is None or part_in_gradients(value) == self.part_in_gradients)
            and not (self.is_bare and value.__dict__ and own_attributes(value))
        )


class Description(NamedTuple):
    """What a file keeps of guards.

    structure   of the arguments
    leaves      of each argument (True, (dtype, device, rank, ...)) if it is a tensor, else (False, itself)
    sizes       sizes and strides that the check let through; None: all are right
    conditions  the check as data; None where it cannot be written down
    without_gradients  whether gradients must be off
    any_order   whether dictionaries may have their keys in any order
    """

    structure: pytree.TreeSpec
    leaves: Sequence[tuple[bool, Any]]
    sizes: list[Any] | None
    conditions: list[Any] | None
    without_gradients: bool
    any_order: bool = False


_MOST_PASSED = 1024  # sets of sizes remembered per graph: lengths that a decoding loop comes by


class Passed(set[tuple[Any, ...]]):
    """Calls, by their sizes, that were found to be right; not more than a graph should remember."""

    def remember(self, sizes: tuple[Any, ...]) -> None:
        """Add one, in place of all where these are many."""
        if len(self) >= _MOST_PASSED:
            self.clear()
        self.add(sizes)


class _Plain(NamedTuple):
    """The structure of a call whose arguments are values, and tuples and lists of values: pytree takes 20 us for that.

    places    how many arguments are by position
    names     of those by name
    lengths   of each argument, its class and length where it is a tuple or list
    """

    places: int
    names: tuple[str, ...]
    lengths: tuple[tuple[Any, int] | None, ...]

    @classmethod
    def of(cls, spec: pytree.TreeSpec) -> _Plain | None:
        """The structure that spec says; None where it has others inside."""
        by_position, by_name = spec.children()
        lengths: list[tuple[Any, int] | None] = []
        for child in (*by_position.children(), *by_name.children()):
            if not child.is_leaf() and not (child.type in (tuple, list) and all(c.is_leaf() for c in child.children())):
                return None
            lengths.append(None if child.is_leaf() else (child.type, len(child.children())))
        return cls(len(by_position.children()), tuple(by_name.context), tuple(lengths))

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The values one after another; None where the structure is another. One of these may be no value then."""
        if len(args) != self.places or tuple(kwargs) != self.names:
            return None
        found: list[Any] = []
        values: tuple[Any, ...] = (*args, *kwargs.values())
        for value, length in zip(values, self.lengths, strict=True):
            if length is None:
                found.append(value)
            elif type(value) is not length[0] or len(value) != length[1]:
                return None
            else:
                found += value
        return found


class Guards:
    """Conditions on the inputs under which an exported graph is the model.

    check    raises AssertionError for sizes that the graph is not right for (None: all are)
    example  the arguments that the graph was made from: others must have their structure, dtypes and numbers
    without_gradients  whether the model computes something else where gradients are enabled
    asked    what else of tensors must be as the example's; None for a graph whose code could not ask
    sizes    which ones torch.export left free where it could
    """

    def __init__(
        self,
        check: Callable[..., Any] | None,
        example: Call,
        without_gradients: bool = False,
        asked: Asked | None = None,
        sizes: FreeSizes = ALL,
    ) -> None:
        self._check, self._without_gradients, self.sizes = check, without_gradients, sizes
        leaves, self._in_spec = pytree.tree_flatten(example)
        self._any_order = asked is None  # an exported program takes arguments out of dictionaries by their keys
        self._leaves = [_TensorLike.of(x, asked) if isinstance(x, torch.Tensor) else x for x in leaves]
        self._plain = _Plain.of(self._in_spec)
        self._passed = Passed()  # sizes and strides that the check let through; it takes longer

    def forbid_gradients(self) -> None:
        """The graph is for calls without gradients alone."""
        self._without_gradients = True

    def description(self) -> Description:
        """The guards as data; the sizes known so far among them."""
        leaves = [(True, tuple(leaf)) if isinstance(leaf, _TensorLike) else (False, leaf) for leaf in self._leaves]
        passed = [[[list(shape), list(strides)] for shape, strides in sizes] for sizes in self._passed]
        check = self._conditions()
        return Description(
            self._in_spec,
            leaves,
            sizes=None if self._check is None else passed,
            conditions=None if check is None else check.rows,
            without_gradients=self._without_gradients,
            any_order=self._any_order,
        )

    def _conditions(self) -> Conditions | None:
        """The check as data."""
        if self._check is None or isinstance(self._check, Conditions):
            return self._check
        known = []
        for sizes in self._passed:
            shapes = iter(shape for shape, _ in sizes)
            known.append([next(shapes) if isinstance(leaf, _TensorLike) else None for leaf in self._leaves])
        return conditions_of(self._check, self._leaves, known)

    @classmethod
    def described(cls, description: Description) -> Guards:
        """The guards of this description: without conditions, those sizes alone that were let through before."""
        structure, leaves, sizes, conditions, without_gradients, any_order = description
        found = cls.__new__(cls)
        check = _refuse if conditions is None else Conditions(conditions, len(leaves))
        found._check, found._in_spec, found._any_order = None if sizes is None else check, structure, any_order
        found._leaves = [_TensorLike(*leaf) if tensor else leaf for tensor, leaf in leaves]
        found._plain, found._without_gradients, found.sizes = _Plain.of(structure), without_gradients, ALL
        found._passed = Passed(tuple((torch.Size(a), tuple(b)) for a, b in entry) for entry in sizes or ())
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_in_spec": pickle.dumps(self._in_spec)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        with structures_copied():
            self.__dict__.update(state, _in_spec=pickle.loads(state["_in_spec"]))

    @property
    def known_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the tensors of a call that the graph is right for; () where they do not matter, or none is known."""
        if self._check is None:
            return ()
        return tuple(tuple(shape) for shape, _ in min(self._passed, default=()))

    @property
    def without_gradients(self) -> bool:
        """Whether the graph is only for calls without gradients: forward asks for it."""
        return self._without_gradients

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_ask: bool = False) -> bool:
        """Whether a call with these arguments may use the graph; without autocast, and no gradient asked for.

        may_ask  whether arguments may ask for gradients, as the graph is run as plain PyTorch
        """
        if torch.is_autocast_enabled("cpu") or (self._without_gradients and torch.is_grad_enabled()):
            return False
        flat = self._flat_like_example(args, kwargs, may_ask)
        if flat is None:
            return False
        if self._check is None:
            return True
        sizes = _sizes(flat)
        if sizes in self._passed:
            return True
        try:
            self._check(*flat)
        except AssertionError:
            return False
        if sizes is not None:
            self._passed.remember(sizes)
        return True

    def resemble(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether such a call is the example's but for sizes; it may ask for gradients."""
        return self._flat_like_example(args, kwargs, True) is not None

    def _flat_like_example(self, args: tuple[Any, ...], kwargs: dict[str, Any], may_ask: bool) -> Any:
        """The arguments one after another; None where their structure, dtypes, ranks or numbers are others."""
        flat: Any = None if self._plain is None else self._plain.flat(args, kwargs)
        if flat is None:
            flat, spec = pytree.tree_flatten((args, kwargs))
            if spec != self._in_spec:
                return None
        for value, like in zip(flat, self._leaves, strict=True):
            if not (like.describes(value, may_ask) if type(like) is _TensorLike else _is_same(value, like)):
                return None
        return flat

    def reordered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The same arguments with the keys of dictionaries in the example's order; None where that is no remedy."""
        if not self._any_order:
            return None
        try:
            flat, spec = pytree.tree_flatten((args, kwargs))
            if spec == self._in_spec or len(flat) != self._in_spec.num_leaves:
                return None
            call: Call = pytree.tree_unflatten(tree_flatten_spec((args, kwargs), self._in_spec), self._in_spec)
        except Exception:  # other keys or containers; whatever a container's own code raises
            return None
        return call

    def __deepcopy__(self, memo: dict[int, Any]) -> Guards:
        return self


def _refuse(*flat: Any) -> None:
    """The check of a graph from a file: what it was called with before is known, and no more."""
    raise AssertionError("other sizes than those that the module was called with before it was saved")


def _sizes(flat: Any) -> tuple[Any, ...] | None:
    """Sizes and strides of the tensors; None where there are none to compare (symbolic ones, sparse tensors)."""
    try:
        sizes = tuple([(x.shape, x.stride()) for x in flat if isinstance(x, torch.Tensor)])
        hash(sizes)
    except (TypeError, RuntimeError):
        return None
    return sizes


def _is_same(value: Any, other: Any) -> bool:
    """Whether an argument that is no tensor is what the example had."""
    if value is other:
        return True
    if type(value) is not type(other) or isinstance(value, torch.Tensor):
        return False
    return repr(value) == repr(other) if isinstance(value, float | complex) else bool(value == other)  # 0.0 == -0.0
