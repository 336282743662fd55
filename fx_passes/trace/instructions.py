"""Reading a function's bytecode: which call a frame is in, and what its code compares.

isinstance(y, Tensor) and torch.relu(y) both ask C code of which class y is. Which of the two it is stands in the
instruction that the frame has come to.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import itertools
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_CALLS = ("CALL", "PRECALL", "CALL_FUNCTION", "CALL_METHOD")
_LOCAL = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_CLASSDEREF")
_TWO_LOCAL = ("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "STORE_FAST_LOAD_FAST")
_VALUES = (*_CALLS, *_LOCAL, *_TWO_LOCAL, "BINARY_SUBSCR")
_OF_IDENTITY = frozenset(("id", "is_", "is_not"))
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_NO_EFFECT = ("NOP", "PUSH_NULL", "COPY_FREE_VARS")
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL")
_TO_NONE = ("POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE", "POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE",
            "POP_JUMP_BACKWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE")  # fmt: skip

_NONE_TESTS = {dis.opmap[name] for name in ("IS_OP", *_TO_NONE) if name in dis.opmap}


class _Listing:
    """The instructions of a code object, found by their offset."""

    def __init__(self, code: types.CodeType) -> None:
        self.rows = [row for row in dis.get_instructions(code) if row.opname != "CACHE"]
        self.index = {row.offset: i for i, row in enumerate(self.rows)}


@functools.lru_cache(maxsize=512)
def _listing(code: types.CodeType) -> _Listing:
    return _Listing(code)


def without_caches(code: types.CodeType) -> Sequence[dis.Instruction]:
    """The instructions of a code object."""
    return _listing(code).rows


def instruction_of(frame: types.FrameType) -> dis.Instruction | None:
    """The instruction that a frame has come to."""
    listing = _listing(frame.f_code)
    i = listing.index.get(frame.f_lasti)
    return None if i is None else listing.rows[i]


def is_call(row: dis.Instruction) -> bool:
    """Whether an instruction calls something with arguments by position."""
    return row.opname in _CALLS


def callee(frame: types.FrameType) -> Any:
    """What the frame's present instruction calls, where its code names it; None where it is not that plain."""
    path = _callee_path(frame.f_code, frame.f_lasti)
    if path is None or len(path.names) > 1:
        return None
    if path.is_local:
        return frame.f_locals.get(path.names[0])
    return frame.f_globals.get(path.names[0], getattr(builtins, path.names[0], None))


class _Path(NamedTuple):
    """A name, and attributes after it: torch.autocast."""

    is_local: bool
    names: tuple[str, ...]


@functools.lru_cache(maxsize=2048)
def _callee_path(code: types.CodeType, offset: int) -> _Path | None:
    """Walk back over the arguments to what pushed the callable."""
    listing = _listing(code)
    i = listing.index.get(offset)
    if i is None or not is_call(listing.rows[i]):
        return None
    below = -int(listing.rows[i].arg or 0)  # the height of the stack without the arguments, relative to now
    i -= 1
    if listing.rows[i].opname == "PRECALL":
        i -= 1
    height = 0
    while i >= 0:
        row = listing.rows[i]
        if height == below and row.opname not in _NO_EFFECT:
            return _path_to(listing.rows, i)
        if row.opcode in dis.hasjrel or row.opcode in dis.hasjabs or row.is_jump_target:
            return None
        if row.opname != "PUSH_NULL" or height != below:
            height -= dis.stack_effect(row.opcode, row.arg if row.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        i -= 1
    return None


def _path_to(rows: Sequence[dis.Instruction], i: int) -> _Path | None:
    """What a row loads: a name, or attributes of what the rows before it load."""
    names: list[str] = []
    while rows[i].opname in _ATTRIBUTE and not rows[i].is_jump_target:
        names.append(str(rows[i].argval))
        i -= 1
    if rows[i].opname not in (*_LOCAL, *_GLOBAL):
        return None
    return _Path(rows[i].opname in _LOCAL, (str(rows[i].argval), *reversed(names)))


def next_compares_to_none(frame: types.FrameType) -> bool:
    """Whether what the present instruction results in is compared with None: at once, or by the name it gets."""
    listing = _listing(frame.f_code)
    i = listing.index.get(frame.f_lasti)
    if i is None:
        return False
    if listing.rows[i].opname == "PRECALL":
        i += 1
    names = set[str]()
    for j, row in enumerate(listing.rows[i + 1 :], i + 1):
        if row.opname in _TO_NONE or (_is_none(row) and listing.rows[j + 1].opname == "IS_OP"):
            return True
        if row.opname in _STORES or row.opname in ("STORE_FAST_STORE_FAST", "STORE_FAST_LOAD_FAST"):
            names.update(row.argval if isinstance(row.argval, tuple) else (str(row.argval),))
        elif row.opname not in ("UNPACK_SEQUENCE", "COPY", "DUP_TOP"):
            break
    return bool(names & compared_to_none(frame.f_code))


@functools.lru_cache(maxsize=512)
def compared_to_none(code: types.CodeType) -> frozenset[str]:
    """Names of the variables that are compared with None."""
    if _NONE_TESTS.isdisjoint(code.co_code[::2]):
        return frozenset()
    rows = _listing(code).rows
    found = set()
    for i, row in enumerate(rows):
        if row.opname in _TO_NONE or (row.opname == "IS_OP" and _is_none(rows[i - 1])):
            before = rows[i - 1 if row.opname in _TO_NONE else i - 2]
            if before.opname in (*_LOCAL, *_TWO_LOCAL, *_GLOBAL, *_STORES):
                found.add(before.argval[-1] if isinstance(before.argval, tuple) else str(before.argval))
    return frozenset(found)


@functools.lru_cache(maxsize=512)
def compared_to_objects(code: types.CodeType) -> frozenset[str]:
    """Names of the variables that are compared by `is` with constants or globals: flag is True, mode is Mode.FAST."""
    if dis.opmap["IS_OP"] not in code.co_code[::2]:
        return frozenset()
    rows = _listing(code).rows
    found = set()
    for i, row in enumerate(rows):
        if row.opname != "IS_OP" or _is_none(rows[i - 1]) or _loads_value(rows, i - 1):
            continue
        while rows[i - 1].opname == "LOAD_ATTR":
            i -= 1
        before = rows[i - 3 if rows[i - 2].opname in ("COPY", "DUP_TOP") else i - 2]  # of a match statement
        if before.opname in (*_LOCAL, *_TWO_LOCAL):
            found.add(before.argval[-1] if isinstance(before.argval, tuple) else str(before.argval))
    return frozenset(found)


@functools.lru_cache(maxsize=512)
def compares_identity(code: types.CodeType) -> bool:
    """Whether something is compared by `is` with what is no plain variable, and not None: y.dtype is torch.half."""
    if dis.opmap["IS_OP"] not in code.co_code[::2]:
        return False
    rows = _listing(code).rows
    return any(
        row.opname == "IS_OP"
        and not _is_none(rows[i - 1])
        and rows[i - 1].opname not in _TWO_LOCAL
        and not (rows[i - 1].opname in _LOCAL and rows[i - 2].opname in _LOCAL)
        for i, row in enumerate(rows)
    )


@functools.lru_cache(maxsize=4096)
def compares_values(code: types.CodeType) -> bool:
    """Whether code asks if two values are one object: `a is b` of variables, attributes or results, id(), is_()."""
    if not _OF_IDENTITY.isdisjoint(code.co_names):
        return True
    if dis.opmap["IS_OP"] not in code.co_code[::2]:
        return False
    rows = _listing(code).rows
    return any(row.opname == "IS_OP" and _loads_value(rows, i - 1) for i, row in enumerate(rows))


def _loads_value(rows: Sequence[dis.Instruction], i: int) -> bool:
    """Whether instruction i puts on the stack what is neither a constant nor a class or function by its name."""
    while rows[i].opname == "LOAD_ATTR":
        i -= 1
    return rows[i].opname in _VALUES


@functools.lru_cache(maxsize=512)
def matches_structure(code: types.CodeType) -> bool:
    """Whether a match statement asks for a sequence or a mapping, which no class can answer for its objects."""
    return not {dis.opmap["MATCH_SEQUENCE"], dis.opmap["MATCH_MAPPING"]}.isdisjoint(code.co_code[::2])


def catches_exceptions(function: types.FunctionType) -> bool:
    """Whether a function has an `except`, a `with` that may suppress exceptions, or a `finally` that returns."""
    caught, contexts = _handlers(function.__code__)
    return caught > sum(_passes_on(function, path) for path in contexts)


@functools.lru_cache(maxsize=4096)
def _handlers(code: types.CodeType) -> tuple[int, Sequence[_Path]]:
    """How often code goes on after an exception, and the names of what its `with` statements call.

    It is the code that is remembered: a function would keep all that it refers to.
    """
    if sys.version_info >= (3, 11) and not code.co_exceptiontable:
        return 0, ()
    pairs = list(itertools.pairwise(without_caches(code)))
    caught = sum(row.opname == "POP_EXCEPT" and after.opname != "RERAISE" for row, after in pairs)
    called = [_callee_path(code, row.offset) for row, after in pairs if after.opname == "BEFORE_WITH"]
    return caught, tuple(path for path in called if path is not None)


def _passes_on(function: types.FunctionType, path: _Path) -> bool:
    """Whether a name stands for a context that suppresses no exceptions: PyTorch's, and nullcontext()."""
    if path.is_local:
        return False
    try:
        found = functools.reduce(getattr, path.names[1:], function.__globals__[path.names[0]])
    except (KeyError, AttributeError):
        return False
    return found is contextlib.nullcontext or getattr(found, "__module__", "").partition(".")[0] == "torch"


def _is_none(row: dis.Instruction) -> bool:
    return row.opname == "LOAD_CONST" and row.argval is None


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from with_inner(constant)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Names that a function reads, functions inside it included."""
    for inner in with_inner(code):
        yield from inner.co_names
