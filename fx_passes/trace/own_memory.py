"""Memory of their own for what calls of a copied model write to: the model that was copied keeps its values.

Those that lie in one piece of memory, as a buffer and a view of it in another one, are moved together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fx_passes.aliasing.effects import may_write_to_held
from fx_passes.graph.graph import get_attribute
from fx_passes.trace.arrays import shared
from fx_passes.trace.aside import storage_of
from fx_passes.trace.skeleton import (
    held_by,
    own_arrays,
    own_state,
    own_tensor,
    own_together,
    own_written,
    tensors_in,
    tensors_of,
)
from fx_passes.trace.state import arrays_of
from fx_passes.trace.symbolic import written_attributes
from fx_passes.trace.traced import Traced


def own_what_is_written(
    every: Sequence[Traced], written: Sequence[tuple[str, str]], shared_before: frozenset[int] | None = None
) -> None:
    """Give what a call writes to storage of its own: the model that was copied keeps its values.

    every          the graph of a tree, and those of submodules; they note what is that model's still (Traced.shared)
    written        (path of a module, name) of tensors that a call of the model was seen to write to
    shared_before  addresses of the memory that is that model's (None: all): other graphs write to the rest, of which
                   callers have views
    Tensors in whose memory an array lies that no copy has, as one in a global, stay there.
    """
    places = {each.root: _storages(each.root, shared_before) for each in every}
    _move(every, written, shared_before)
    for each in every:
        each.shared = places[each.root] & _storages(each.root, None)


def _storages(root: nn.Module, among: frozenset[int] | None) -> frozenset[int]:
    """The addresses of the memory that a tree's tensors lie in, those among these."""
    found = frozenset(filter(None, map(storage_of, tensors_of(root))))
    return found if among is None else found & among


def _move(every: Sequence[Traced], written: Sequence[tuple[str, str]], shared_before: frozenset[int] | None) -> None:
    """As own_what_is_written(), which notes what stays."""
    root = every[0].root
    written = list(dict.fromkeys([*written, *_written_while_traced(every), *_written_by_layers(every)]))
    if not written and not any(each.stateful or _writes(each) for each in every):
        return
    own = own_arrays(root)
    beside = shared(tensors_of(root), arrays_of(root))
    kept = {id(value) for value in (*own, *(value for group in beside for value in group))}
    writing = [each for each in every if _writes(each)]
    targets = [(each.root, name) for each in writing for name in written_attributes(each.graph, each.root)]
    if shared_before is not None:
        kept.update(id(each) for each in tensors_of(root) if storage_of(each) not in shared_before)
        targets = [(tree, name) for tree, name in targets if _is_shared(get_attribute(tree, name), shared_before)]
    stateful = [each.root.get_submodule(path) for each in every for path in each.stateful]
    values = [get_attribute(tree, target) for tree, target in targets]
    values += [held_by(root.get_submodule(path))[name] for path, name in written]
    values += [v for module in stateful for v in held_by(module).values() if not isinstance(v, nn.Parameter)]
    moved = set(map(id, own_together(root, {id(each) for value in values for each in tensors_in(value)}, kept)))
    moved.update(map(id, own_written(root, written, kept | moved)))
    for module in stateful:
        own_state(module, kept | moved)
    for tree, target in targets:
        owner, _, name = target.rpartition(".")
        if id(get_attribute(tree, target)) not in moved:
            own_tensor(tree.get_submodule(owner), name)


def _is_shared(value: Any, places: frozenset[int]) -> bool:
    """Whether a tensor in value lies in memory at these addresses."""
    return any(storage_of(each) in places for each in tensors_in(value))


def _written_while_traced(every: Sequence[Traced]) -> list[tuple[str, str]]:
    """What forwards wrote to while they were traced, by paths in the first one's tree."""
    noted = [each for each in every if each.written]
    path_of = {id(module): path for path, module in every[0].root.named_modules()} if noted else {}
    return [
        (".".join(filter(None, (path_of[id(each.root)], path))), name) for each in noted for path, name in each.written
    ]


def _written_by_layers(every: Sequence[Traced]) -> Iterator[tuple[str, str]]:
    """What layers of PyTorch write to that graphs call as they are, by paths in the first one's tree.

    Batch normalization in training mode updates statistics; an embedding with max_norm scales the rows that it reads.
    """
    called = {
        id(module)
        for each in every
        if each.graph is not None
        for node in each.graph.find_nodes(op="call_module")
        for module in each.root.get_submodule(node.target).modules()
    }
    for path, module in every[0].root.named_modules() if called else ():
        if id(module) not in called:
            continue
        if isinstance(module, _NormBase) and module.training:
            names = ["running_mean", "running_var", "num_batches_tracked"]
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            names = ["weight"]
        else:
            continue
        yield from ((path, name) for name in names if held_by(module).get(name) is not None)


def _writes(traced: Traced) -> bool:
    """Whether its graph may write to a tensor that the tree has."""
    return traced.graph is not None and may_write_to_held(traced.graph, traced.root)
