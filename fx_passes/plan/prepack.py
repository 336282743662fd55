"""Constant weights in the layouts that primitives want: reordered once, shared by every program that asks again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from fx_passes.candidates.candidates import Weights
from fx_passes.candidates.layouts import same_bytes, strided
from zendnn_cffi.locks import new_lock
from zendnn_cffi.primitives import winograd
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SCRATCHPAD, ARG_SRC
from zendnn_cffi.primitives.lpgemm import PackedLayout
from zendnn_cffi.primitives.memory import Memory, MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive, PrimitiveDesc
from zendnn_cffi.runtime import huge_pages
from zendnn_cffi.runtime.places import Slot

Allocate = Callable[[int], torch.Tensor]
_FIRST_BYTES = 4096  # compared before all others
_SPARE_DESCS = 32  # 4 KB each with its key: sums of attention have one for each length
_FLAGS_AT = 696  # is_memory_const and is_inplace in zendnn_memory_desc_t of ZenDNN 5.1


class Packed(NamedTuple):
    """Packed weights: bytes in the layout desc, of the constant or of its transpose."""

    data: torch.Tensor
    desc: MemoryDesc
    transposed: bool


class Workspace:
    """Memory that packing one weight needs for a moment, used again by the next. Not thread-safe.

    Fresh pages cost a fault each. A ResNet-50 would take 80 MB of them for Winograd's transforms and folded weights.
    """

    def __init__(self) -> None:
        self.folded = huge_pages.Reused()
        self.tried = huge_pages.Reused()
        self.scratchpad = huge_pages.Reused()


class WeightStore:
    """Prepacked weights by (name, layout), for as long as a program uses them.

    A weight that already lies as wanted is used where it is, not copied.
    is_tried  programs use it for a trial: huge pages are worth waiting for, as they are measured on these
    """

    def __init__(self, *, is_tried: bool = False) -> None:
        self.is_tried = is_tried
        self._packed: WeakValueDictionary[tuple[str, bytes, bool], torch.Tensor] = WeakValueDictionary()
        self._descs: dict[bytes, MemoryDesc] = {}
        self._given: Mapping[tuple[str, str, bool], torch.Tensor] = {}
        self._beside: tuple[WeightStore, ...] = ()
        self._lock = new_lock()

    def share_with(self, stores: Iterable[WeightStore]) -> None:
        """From now on, keep no weights that one of these has packed to the same bytes in the same layout."""
        self._beside = tuple(store for store in stores if store is not self)

    def get(
        self, weights: Weights, allocate: Allocate = huge_pages.allocate, workspace: Workspace | None = None
    ) -> torch.Tensor:
        """Return a tensor whose memory holds the weights in weights.desc; allocate makes it where there is none."""
        key = weights.key, layout_key(weights.desc), weights.transposed
        with self._lock:
            packed = self._packed.get(key)
            if packed is None:
                given = self._given.get((weights.key, layout_digest(weights.desc), weights.transposed))
                if given is None or given.nbytes < weights.desc.size_bytes:
                    given = self._packed_once(weights, allocate, workspace or Workspace())
                packed = self._packed[key] = given
                self._note(key[1], weights.desc)
            return packed

    def _packed_once(self, weights: Weights, allocate: Allocate, workspace: Workspace) -> torch.Tensor:
        """Pack weights, or take what another store packed to the same: names tell nothing across graphs, bytes do."""
        layout, size_bytes = (layout_key(weights.desc), weights.transposed), weights.desc.size_bytes
        alike = [
            packed
            for store in self._beside
            for (_, *theirs), packed in store._held()
            if tuple(theirs) == layout and packed.dtype == torch.uint8 and packed.nbytes == size_bytes
        ]
        if not alike:
            return prepack(weights, allocate, workspace, late=not self.is_tried)
        tried = workspace.tried.take(size_bytes)
        made = prepack(weights, lambda _: tried, workspace, late=not self.is_tried)
        if made is not tried:  # used where it lies
            return made
        for packed in alike:
            if torch.equal(packed[:_FIRST_BYTES], made[:_FIRST_BYTES]) and torch.equal(packed, made):
                return packed
        return _allocated(allocate, weights.desc).copy_(made)

    def _held(self) -> list[tuple[tuple[str, bytes, bool], torch.Tensor]]:
        """What there is now, at one go: another thread may pack meanwhile, and two stores may ask each other."""
        references: list[Any] = self._packed.valuerefs()
        return [(each.key, packed) for each in references if (packed := each()) is not None]

    def _note(self, layout: bytes, desc: MemoryDesc) -> None:
        """Remember a layout; those that no program has weights in any longer go now and then."""
        self._descs[layout] = desc
        if len(self._descs) > _SPARE_DESCS + 2 * len(self._packed):
            used = {layout for _, layout, _ in list(self._packed)}
            self._descs = {layout: desc for layout, desc in self._descs.items() if layout in used}

    def added_bytes(self, weights: Weights, storages: Collection[int]) -> int:
        """Bytes that `get` of them would add: none where they are there, in the memory of a parameter, or given.

        storages  addresses of the parameters' memory
        """
        key = weights.key, layout_key(weights.desc), weights.transposed
        with self._lock:
            if any(key in store._packed for store in (self, *self._beside)):
                return 0
            if (weights.key, layout_digest(weights.desc), weights.transposed) in self._given:
                return 0
        lies = as_wanted(weights)
        return 0 if lies is not None and lies.untyped_storage().data_ptr() in storages else weights.desc.size_bytes

    def give(self, given: Mapping[tuple[str, str, bool], torch.Tensor]) -> None:
        """Let weights that were packed before, by (name, digest of the layout, transposed), be taken as they are."""
        with self._lock:
            self._given = {**self._given, **given}

    def by_name(self) -> dict[str, list[Packed]]:
        """What there is now, by name."""
        found: dict[str, list[Packed]] = {}
        with self._lock:
            for (name, layout, transposed), packed in list(self._packed.items()):
                found.setdefault(name, []).append(Packed(packed, self._descs[layout], transposed))
        return found

    def clear(self) -> None:
        """Forget everything: the parameters changed."""
        with self._lock:
            self._packed.clear()
            self._descs.clear()
            self._given = {}

    def size_bytes(self, originals: Iterable[torch.Tensor] = ()) -> int:
        """Bytes of packed and folded copies; weights used where they are, in memory of `originals`, do not count."""
        return sum(t.nbytes for t in self.copies(originals))

    def copies(self, originals: Iterable[torch.Tensor] = ()) -> list[torch.Tensor]:
        """What size_bytes counts, each once."""
        known = {t.untyped_storage().data_ptr() for t in originals}
        with self._lock:
            held = {id(t): t for t in self._packed.values()}
        return [t for t in held.values() if t.untyped_storage().data_ptr() not in known]


def layout_key(desc: MemoryDesc | PackedLayout) -> bytes:
    """Equal for equal layouts: the descriptor's bytes but for the flags behind them, which say how memory is used.

    The library sets those of what it was asked to choose, and not always alike.
    """
    return desc.key if isinstance(desc, PackedLayout) else desc.key[:_FLAGS_AT]


def layout_digest(desc: MemoryDesc | PackedLayout) -> str:
    """What names a layout in files."""
    return hashlib.sha256(layout_key(desc)).hexdigest()[:16]


def as_it_lies(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
    """The bytes from a tensor's first element on, in the order of memory, whatever its strides."""
    first = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage(), first, (size_bytes,))


def prepack(
    weights: Weights,
    allocate: Allocate = huge_pages.allocate,
    workspace: Workspace | None = None,
    *,
    late: bool = False,
) -> torch.Tensor:
    """Return weights.plain in the layout weights.desc: itself where it lies so already, else a new uint8 tensor.

    late  whether itself may move onto huge pages seconds later

    plain may have another shape than desc where only ones differ (a bias [C] seen as [1, C, 1, 1]).
    """
    workspace = workspace or Workspace()
    is_temporary = weights.late is not None
    with huge_pages.lending(workspace.folded):
        weights = weights.computed()
    if weights.below:
        return stack((weights.plain, *weights.below), weights.desc, allocate)
    if (lies := as_wanted(weights)) is not None:
        if is_temporary:
            return _allocated(allocate, weights.desc).copy_(as_it_lies(lies, weights.desc.size_bytes))
        if weights.is_streamed:
            huge_pages.advise([lies], late=late)
        return lies
    desc = weights.desc
    if isinstance(desc, PackedLayout):
        packed = _allocated(allocate, desc)
        desc.pack(weights.plain.detach().to(desc.dtype).contiguous(), packed)
        return packed
    plain = _as_seen(weights, desc)
    if (layout := winograd.layout_of(desc)) is not None:
        packed = _allocated(allocate, desc)
        winograd.pack(plain, layout, packed, workspace.scratchpad.take(layout.scratch_bytes))
        return packed
    if desc.outer_strides is None and desc.dtype is not None:
        plain = plain.to(desc.dtype).contiguous()  # Winograd's transform is a reorder from that alone
    elif plain.dtype == torch.float16:
        plain = plain.float()  # the library's reorders of it are slow
    have = strided(tuple(plain.shape), plain.dtype, tuple(plain.stride()))
    packed = _allocated(allocate, desc)
    primitive = Primitive(PrimitiveDesc.reorder(have, desc))
    memories = {ARG_SRC: Memory(have, plain), ARG_DST: Memory(desc, packed)}
    if (needed := primitive.pd.scratchpad_desc) is not None:
        memories[ARG_SCRATCHPAD] = Memory(needed, workspace.scratchpad.take(needed.size_bytes))
    primitive.execute(memories)
    return packed


def _allocated(allocate: Allocate, desc: MemoryDesc | PackedLayout) -> torch.Tensor:
    with torch.inference_mode(False):
        return allocate(desc.size_bytes)


def as_wanted(weights: Weights) -> torch.Tensor | None:
    """The plain weights, seen as primitives want them, where they lie so already."""
    if weights.below or weights.late is not None or isinstance(weights.desc, PackedLayout):
        return None
    plain = _as_seen(weights, weights.desc)
    have = strided(tuple(plain.shape), plain.dtype, tuple(plain.stride()))
    return plain if same_bytes(have, weights.desc) else None


def _as_seen(weights: Weights, desc: MemoryDesc) -> torch.Tensor:
    """The plain weights in the shape that primitives see."""
    plain = weights.plain.detach()
    return (plain.t() if weights.transposed else plain).reshape(desc.dims)


def stack(tensors: Sequence[torch.Tensor], desc: MemoryDesc, allocate: Allocate = huge_pages.allocate) -> torch.Tensor:
    """Return the tensors one under the other, row by row in the dtype of desc: a new uint8 tensor."""
    assert desc.dtype is not None
    with torch.inference_mode(False), torch.no_grad():
        packed = allocate(desc.size_bytes)
        rows = packed.view(desc.dtype).view(-1, *tensors[0].shape[1:]).split([t.shape[0] for t in tensors])
        for row, tensor in zip(rows, tensors, strict=True):
            row.copy_(tensor)
    return packed


class Prepacked:
    """The constants of one program: each prepacked weight once, as a slot."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._slots: dict[int, Slot] = {}
        self._pool, self._workspace = huge_pages.Pool(late=not store.is_tried), Workspace()
        self.tensors: list[torch.Tensor] = []

    def slot(self, weights: Weights) -> Slot:
        """Where the program finds these weights."""
        tensor = self._store.get(weights, self._pool.allocate, self._workspace)
        slot = self._slots.get(id(tensor))
        if slot is None:
            slot = self._slots[id(tensor)] = Slot("constant", len(self.tensors))
            self.tensors.append(tensor)
        return slot
