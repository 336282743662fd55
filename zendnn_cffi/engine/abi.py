"""Accept a library only if it is what the declarations say: version, functions, enumerators, struct sizes.

ABI mode believes the declarations; a wrong one is a crash, not a message. So before anything else runs, the library
itself is asked: every function resolves, every enumerator carries the name its *2str function prints, every descriptor
a *_desc_init writes is as long as declared. Two milliseconds in all.
"""

from __future__ import annotations

import os
import time
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

from zendnn_cffi.engine.loaded import Library, exports
from zendnn_cffi.errors import LibraryError
from zendnn_cffi.locks import new_lock

# enumeration -> (function that names its values, enumerators it spells otherwise: ours -> its)
NAMED_ENUMS: dict[str, tuple[str, dict[str, str]]] = {
    "status_t": ("status2str", {}),
    "data_type_t": ("dt2str", {"data_type_undef": "undef"}),
    "format_kind_t": (
        "fmt_kind2str",
        {f"format_kind_{name}": name for name in ("undef", "any", "wino", "rnn_packed")},
    ),
    "format_tag_t": ("fmt_tag2str", {"format_tag_undef": "undef", "format_tag_any": "any"}),
    "prop_kind_t": ("prop_kind2str", {"prop_kind_undef": "undef"}),
    "primitive_kind_t": ("prim_kind2str", {"undefined_primitive": "undef"}),
    "alg_kind_t": ("alg_kind2str", {"alg_kind_undef": "undef"}),
    "rnn_flags_t": ("rnn_flags2str", {"rnn_flags_undef": "undef"}),
    "rnn_direction_t": ("rnn_direction2str", {}),
    "engine_kind_t": ("engine_kind2str", {"any_engine": "any"}),
    "fpmath_mode_t": ("fpmath_mode2str", {"fpmath_mode_any": "any"}),
    "scratchpad_mode_t": (
        "scratchpad_mode2str",
        {"scratchpad_mode_library": "library", "scratchpad_mode_user": "user"},
    ),
    "cpu_isa_t": ("cpu_isa2str", {}),
    "cpu_isa_hints_t": ("cpu_isa_hints2str", {}),
}
GUARD_BYTES = 16384  # behind every descriptor, to see (and survive) a write past its declared end


class IncompatibleError(LibraryError):
    """The library is not the one declared. `missing` names the functions it lacks."""

    def __init__(self, message: str, status: int | None = None, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message, status)
        self.missing = missing


@cache
def declared_names(module: types.ModuleType) -> frozenset[str]:
    """Return every function and constant a generated module declares."""
    return frozenset(dir(module.ffi.dlopen(None)))


@cache
def declared_functions(module: types.ModuleType) -> frozenset[str]:
    """Return every function a generated module declares."""
    return frozenset(name for name in declared_names(module) if not _is_constant(module.ffi, name))


def _is_constant(ffi: Any, name: str) -> bool:
    try:
        ffi.integer_const(name)
    except ffi.error:
        return False
    return True


def accept(library: Library, module: types.ModuleType, supported: tuple[tuple[int, int], ...]) -> str:
    """Return the library's version, "5.1.0", having checked everything; IncompatibleError otherwise."""
    check_functions(library, declared_functions(module))
    version = check_version(library, supported)
    check_enums(library)
    check_structs(library)
    return version


def check_functions(library: Library, names: frozenset[str]) -> None:
    """Resolve every declared function, and name all that are missing at once."""
    missing = tuple(name for name in sorted(names) if not exports(library.ffi, library.lib, name))
    if missing:
        raise IncompatibleError(
            f"{library.path} lacks {len(missing)} of {len(names)} functions: {', '.join(missing)}. "
            f"It is not the library these declarations are for (ZenDNN 5.2 and later have no C API).",
            missing=missing,
        )


def check_version(library: Library, supported: tuple[tuple[int, int], ...]) -> str:
    """Return the version the library reports, if its first two numbers are among `supported`."""
    found = library.fn("version")()
    text = f"{found.major}.{found.minor}.{found.patch}"
    if (found.major, found.minor) not in supported:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in supported)
        raise IncompatibleError(f"{library.path} is version {text}; these declarations are for {wanted}.")
    return text


def check_enums(library: Library) -> None:
    """Compare each value's name in the library with the enumerators declared for it."""
    wrong: list[str] = []
    for enum, (function, spelled) in NAMED_ENUMS.items():
        to_string = library.fn(function)
        by_value: dict[int, set[str]] = {}
        for name, value in library.ctype(enum).relements.items():
            short = name[len(library.prefix) :]
            by_value.setdefault(value, set()).add(spelled.get(short, short))
        for value, names in by_value.items():
            told = library.ffi.string(to_string(value)).decode()
            # alternatives are printed as "lrn_across or ..."; the *_max and *_last markers have no name
            if names.isdisjoint(told.split(" or ")) and not all(n.endswith(("_max", "_last")) for n in names):
                wrong.append(f"{enum} {value} is {told}, declared as {'/'.join(sorted(names))}")
    if wrong:
        raise IncompatibleError(f"{library.path}: enumerators differ from the declared: {'; '.join(wrong)}.")


def written_extent(library: Library, type_name: str, fill: Callable[[Any], int]) -> int:
    """Return how many bytes, from the start, `fill(pointer)` writes: patterns before, comparison after.

    A byte equal to both patterns cannot be; one that holds either pattern afterwards still differs from the other.
    """
    ffi = library.ffi
    size = ffi.sizeof(library.ctype(type_name)) + GUARD_BYTES
    extent = 0
    for pattern in (0xAA, 0x55):
        buffer = ffi.new("char[]", bytes([pattern]) * size)
        status = fill(ffi.cast(library.ctype(f"{type_name} *"), buffer))
        if status:
            raise IncompatibleError(f"{library.path}: filling {library.prefix}{type_name} returned status {status}.")
        content = bytes(ffi.buffer(buffer, size))
        extent = max(extent, len(content.rstrip(bytes([pattern]))))
    return extent


def check_structs(library: Library) -> None:
    """Compare the size of each descriptor the library can fill with the declared one.

    The memory descriptor comes first and a difference stops at once: what follows is made of memory descriptors.
    """
    for type_name, fill in fillers(library):
        extent, size = written_extent(library, type_name, fill), library.ffi.sizeof(library.ctype(type_name))
        if not size - 8 < extent <= size:  # up to seven bytes of padding at the end may stay unwritten
            found = f"{library.prefix}{type_name} is {extent} bytes long, declared as {size}"
            raise IncompatibleError(f"{library.path}: descriptors differ from the declared: {found}.")


def fill_memory_desc(
    library: Library, desc: Any, dims: tuple[int, ...] = (2, 2), data_type: str = "f32", tag: str = "ab"
) -> int:
    """Fill a memory descriptor by tag and return the status."""
    tag_value = library.const("format_tag_any" if tag == "any" else tag)
    padded = dims + (0,) * (12 - len(dims))
    init = library.fn("memory_desc_init_by_tag")
    return int(init(desc, len(dims), padded, library.const(data_type), tag_value, *library.desc_flags))


def make_desc(library: Library, dims: tuple[int, ...], data_type: str = "f32", tag: str = "any") -> Any:
    """Return a memory descriptor, made with as few of our own layers as possible."""
    desc = library.new("memory_desc_t *")
    status = fill_memory_desc(library, desc, dims, data_type, tag)
    if status:
        raise IncompatibleError(f"{library.path}: memory_desc_init_by_tag returned status {status}.")
    return desc


def fillers(library: Library) -> Iterator[tuple[str, Callable[[Any], int]]]:
    """Yield (descriptor type, function filling one through the library's own *_desc_init)."""
    yield "memory_desc_t", lambda desc: fill_memory_desc(library, desc)
    fn, const, null = library.fn, library.const, library.ffi.NULL
    image, kernel, row = make_desc(library, (1, 2, 3, 3)), make_desc(library, (2, 2, 1, 1)), make_desc(library, (2, 2))
    plain = make_desc(library, (2, 2), tag="ab")
    inference, ones, zeros = const("forward_inference"), (1,) * 12, (0,) * 12
    yield (
        "convolution_desc_t",
        lambda desc: fn("convolution_forward_desc_init")(
            desc, inference, const("convolution_direct"), image, kernel, null, image, ones, zeros, zeros
        ),
    )
    yield (
        "inner_product_desc_t",
        lambda desc: fn("inner_product_forward_desc_init")(desc, inference, row, row, null, row),
    )
    yield "matmul_desc_t", lambda desc: fn("matmul_desc_init")(desc, row, row, null, row)
    yield (
        "eltwise_desc_t",
        lambda desc: fn("eltwise_forward_desc_init")(desc, inference, const("eltwise_relu"), plain, 0.5, 0.25),
    )
    yield "binary_desc_t", lambda desc: fn("binary_desc_init")(desc, const("binary_add"), plain, plain, row)
    yield "softmax_desc_t", lambda desc: fn("softmax_forward_desc_init")(desc, inference, plain, 1)
    yield "logsoftmax_desc_t", lambda desc: fn("logsoftmax_forward_desc_init")(desc, inference, plain, 1)
    yield (
        "softmax_v2_desc_t",
        lambda desc: fn("softmax_v2_forward_desc_init")(desc, inference, const("softmax_log"), plain, row, 1),
    )
    if library.has("embedding_bag_desc_init"):
        silences = iter((quiet_stderr(),))  # the banner comes once
        yield "embedding_bag_desc_t", lambda desc: fill_embedding_bag(library, desc, next(silences, nullcontext()))


def fill_embedding_bag(library: Library, desc: Any, silence: AbstractContextManager[None]) -> int:
    """Fill an embedding_bag descriptor, inside what keeps off the banner the library prints on its first one."""
    table, values = make_desc(library, (1, 1), tag="ab"), make_desc(library, (1,), "s32", "a")
    kind, mode = library.const("forward_inference"), library.const("embedding_bag_sum")
    with silence:
        status = library.fn("embedding_bag_desc_init")(
            desc, kind, mode, 0, table, values, values, library.ffi.NULL, table, -1, 1, 0
        )
    return int(status)


_stderr_lock = new_lock()
_LATE_WRITE_SECONDS = 0.005
BANNER = b"ZenDNN Info: Execution has entered the ZenDNN library"


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Take the library's start banner out of what is written to descriptor 2 meanwhile; the rest still arrives.

    No variable turns the banner off. Descriptor 2 points at a memory file for the length of one C call; what other
    threads wrote there in that time is passed on afterwards. Only a write that is still on its way _LATE_WRITE_SECONDS
    after the call is lost.
    """
    with _stderr_lock, ExitStack() as stack:
        try:
            saved = os.dup(2)
            stack.callback(os.close, saved)
            caught = _memory_file()
            stack.callback(os.close, caught)
        except OSError:  # no stderr, so nothing to keep clean; or no file at all, so the banner appears
            yield
            return
        os.dup2(caught, 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            if not _is_only_thread():
                time.sleep(_LATE_WRITE_SECONDS)  # a write that had begun before lands in the memory file a moment later
            rest = without_banner(os.pread(caught, os.fstat(caught).st_size, 0))
            if rest:
                os.write(2, rest)


def _memory_file() -> int:
    """A descriptor of a file in memory; of one on disk where Python, built on an old system, has no such call."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("zendnn-cffi-stderr")
    import tempfile  # 4 ms that few need

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _is_only_thread() -> bool:
    """Whether this process has no thread but the calling one."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def without_banner(written: bytes) -> bytes:
    """Return `written` less the banner line and the blank lines around it."""
    lines = written.splitlines(keepends=True)
    at = next((i for i, line in enumerate(lines) if line.startswith(BANNER)), None)
    if at is None:
        return written
    before, after = lines[:at], lines[at + 1 :]
    if before and not before[-1].strip():
        before.pop()
    if after and not after[0].strip():
        after.pop(0)
    return b"".join(before + after)
