"""What boolean attention masks say, found by looking at them: most leave nothing out, what comes later, or padding.

Models make masks for sentences of unequal length and hand them over when all are equally long, too. Without a mask
attention is faster, and reads nothing that is not there; so a region is lowered for what its masks say as well as for
their shapes. Looking costs a few microseconds a call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from fx_passes import ops
from fx_passes.graph.graph import argument, copy_graph, is_call

FULL, CAUSAL, KEYS, LIVE, OTHER = "full", "causal", "keys", "live", "other"
_MAX_CAUSAL = 4096  # longer masks are not compared: that would cost more than it saves


def mask_inputs(graph: fx.Graph) -> tuple[int, ...]:
    """The numbers of the inputs that attentions alone read, as their mask."""
    return tuple(
        number
        for number, node in enumerate(graph.find_nodes(op="placeholder"))
        if node.users and all(_is_mask_of(node, user) for user in node.users)
    )


def _is_mask_of(node: fx.Node, user: fx.Node) -> bool:
    if not is_call(user, ops.attention, ops.cached_attention) or argument(user, 3, "mask") is not node:
        return False
    return not user.kwargs.get("is_causal", False) and user.all_input_nodes.count(node) == 1


def remember(mask: Tensor) -> None:
    """Let kind_of and additive look at a tensor once: nobody will ever write to it."""
    mask._zendnn_cffi_known = {}


def known_of(mask: Tensor) -> Collection[Any]:
    """What was found out, and made, of a tensor that is looked at once."""
    known: dict[Any, Any] = getattr(mask, "_zendnn_cffi_known", {})
    return tuple(known.values())


def asked_once(mask: Tensor) -> Tensor:
    """Return mask as a tensor of its own, for one call: what regions ask of it is remembered."""
    alone = mask.detach()
    remember(alone)
    return alone


def kind_of(mask: Tensor, *, keys: bool = True) -> str:
    """As describe, remembered for tensors that say so."""
    known: dict[Any, Any] | None = getattr(mask, "_zendnn_cffi_known", None)
    if known is None:
        return describe(mask, keys=keys)
    if keys not in known:
        known[keys] = describe(mask, keys=keys)
    return str(known[keys])


def additive(mask: Tensor, of_keys: bool) -> Tensor:
    """As ops.additive_mask, remembered for tensors that say so. Not to be written to."""
    known: dict[Any, Any] | None = getattr(mask, "_zendnn_cffi_known", None)
    if known is None:
        return ops.additive_mask(mask, of_keys)
    found = known.get(("additive", of_keys))
    if found is None:
        with torch.inference_mode(False):
            found = known["additive", of_keys] = ops.additive_mask(mask, of_keys)
    return found


def describe(mask: Tensor, *, keys: bool = True) -> str:
    """FULL where every position takes part, CAUSAL where position i sees 0 to i, LIVE where a mask of four dimensions
    leaves something of each row (KEYS: the same of all), else OTHER; [..., L, S] boolean.

    keys  whether KEYS is told from LIVE: a softmax is faster with the whole mask
    """
    if mask.dtype != torch.bool or mask.ndim < 2 or mask.numel() == 0:
        return OTHER
    sizes = [(slice(1) if step == 0 else slice(None)) for step in mask.stride()]
    once = mask[tuple(sizes)]
    if bool(once.all()):
        return FULL
    if _is_causal(mask):
        return CAUSAL
    if mask.ndim != 4 or mask.stride(-1) == 0:
        return OTHER
    is_of_one_row = once.shape[1] == once.shape[2] == 1
    if keys and (is_of_one_row or bool((once == once[:, :1, :1]).all())):
        return KEYS if bool(once[:, :1, :1].any(-1).all()) else OTHER
    return LIVE if bool(once.any(-1).all()) else OTHER


def _is_causal(mask: Tensor) -> bool:
    length = mask.shape[-1]
    if mask.shape[-2] != length or length > _MAX_CAUSAL or bool(mask[(0,) * (mask.ndim - 1)][-1]):
        return False
    leading = tuple(0 if step == 0 else slice(None) for step in mask.stride()[:-2])
    return bool((mask[leading] == _lower_triangle(length)).all())


@lru_cache(maxsize=8)
def _lower_triangle(length: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(length, length, dtype=torch.bool, device="cpu").tril_()


def specialize(graph: fx.Graph, masks: Sequence[int], kinds: Sequence[str]) -> fx.Graph:
    """Return a copy of graph for masks (numbers of inputs) that say `kinds`. The inputs stay.

    FULL and CAUSAL ones are no longer read; KEYS and LIVE ones are made additive once, and all attentions read that.
    """
    special = copy_graph(graph)
    placeholders = special.find_nodes(op="placeholder")
    for number, kind in zip(masks, kinds, strict=True):
        users = list(placeholders[number].users) if kind != OTHER else []
        if kind in (KEYS, LIVE):
            readers = [user for user in users if user.target is ops.attention]
            _make_additive(placeholders[number], readers, of_keys=kind == KEYS)
            continue
        for user in users:
            others = {name: value for name, value in user.kwargs.items() if name != "mask"}
            user.args = (*user.args[:3], None) if len(user.args) > 3 else user.args
            user.kwargs = {**others, "is_causal": kind == CAUSAL}
    return special


def _make_additive(mask: fx.Node, users: Sequence[fx.Node], *, of_keys: bool) -> None:
    if not users:
        return
    with mask.graph.inserting_before(users[0]):
        added = mask.graph.call_function(ops.additive_mask, (mask, of_keys))
    for user in users:
        user.replace_input_with(mask, added)
