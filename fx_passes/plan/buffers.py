"""Buffers: stretches of memory that values of a program lie in, before they have addresses.

A buffer may come to lie inside another: at offset 0 where a result takes over an operand's memory, at a slice's offset
where a piece of a concatenation is written straight into the whole. Only outermost buffers are given memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from fx_passes.plan.arena import Lifetime, plan_arena
from zendnn_cffi.runtime.places import Slot
from zendnn_cffi.values import dataclass

END = 1 << 60


@dataclass(eq=False)
class Buffer:
    """A stretch of memory that is spoken for between two steps, both included.

    space  "arena" until it is found to be region input or output `index`
    home   the buffer it lies in and the offset there, if it lies in one
    """

    size_bytes: int
    first: int
    last: int
    space: str = "arena"
    index: int = 0
    home: tuple[Buffer, int] | None = None

    def place(self) -> tuple[Buffer, int]:
        """The outermost buffer that this one lies in, and where in it."""
        buffer, offset = self, 0
        while buffer.home is not None:
            offset += buffer.home[1]
            buffer = buffer.home[0]
        return buffer, offset

    @property
    def root(self) -> Buffer:
        """The outermost buffer that this one lies in."""
        return self.place()[0]

    def touch(self, step: int) -> None:
        """Keep the memory until `step` at least."""
        root = self.root
        root.last = max(root.last, step)

    def move_into(self, home: Buffer, offset_bytes: int) -> None:
        """Lie in `home` from now on; self must be outermost."""
        assert self.home is None and self is not home
        self.home = home, offset_bytes
        root = home.root
        root.first, root.last = min(root.first, self.first), max(root.last, self.last)


def nest_pieces(pieces: Sequence[tuple[Buffer, int, int]], whole: Buffer) -> list[bool]:
    """Let pieces of a concatenation lie in the whole; say of each whether it does.

    pieces  (buffer, size in bytes, offset in the whole) in order; the sizes are those of the slices

    A piece whose buffer is its own moves in. Pieces that already lie side by side in an earlier concatenation, as they
    should in this one, move in with all of it (a densely connected block: each concatenation begins with the last one).
    """
    nested: list[bool] = []
    for number, (buffer, size_bytes, offset) in enumerate(pieces):
        root, inside = buffer.place()
        if root is whole:
            nested.append(inside == offset)
            continue
        start = offset - inside
        free = root.space == "arena" and start >= 0 and start + root.size_bytes <= whole.size_bytes
        if free and buffer.size_bytes == size_bytes and _covers(root, start, pieces[number:]):
            root.move_into(whole, start)
            nested.append(True)
        else:
            nested.append(False)
    return nested


def _covers(root: Buffer, start: int, pieces: Sequence[tuple[Buffer, int, int]]) -> bool:
    """Whether the pieces to come include all of root, each where root would have it: nothing else may lie under it."""
    covered = 0
    for buffer, size_bytes, offset in pieces:
        home, inside = buffer.place()
        if home is root and start + inside == offset and buffer.size_bytes == size_bytes:
            covered += size_bytes
    return covered == root.size_bytes


def assign_slots(buffers: Sequence[Buffer]) -> tuple[dict[Buffer, Slot], int]:
    """A slot for every buffer, and the size of the arena."""
    arena = [b for b in buffers if b.home is None and b.space == "arena"]
    offsets, arena_bytes = plan_arena([Lifetime(b.size_bytes, b.first, b.last) for b in arena])
    starts = dict(zip(arena, offsets, strict=True))
    slots = {}
    for buffer in buffers:
        root, inside = buffer.place()
        slots[buffer] = Slot(root.space, root.index, starts.get(root, 0) + inside)
    return slots, arena_bytes
