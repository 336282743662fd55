"""The declarations against the binary; and the check made on loading, against declarations made wrong on purpose."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest

from zendnn_cffi import build_ffi
from zendnn_cffi.engine import abi
from zendnn_cffi.engine.library import declarations
from zendnn_cffi.engine.loaded import Library
from zendnn_cffi.errors import LibraryError

FFI = declarations("_zendnn").ffi
TAGS: dict[str, int] = {
    name.removeprefix("zendnn_"): value for name, value in FFI.typeof("zendnn_format_tag_t").relements.items()
}
# logical dimension letters of each family of aliases, in the order a, b, c, ...
DOMAINS = [
    "x",
    "nc",
    "tn",
    "ncw",
    "nchw",
    "ncdhw",
    "oi",
    "oiw",
    "oihw",
    "oidhw",
    "goiw",
    "goihw",
    "goidhw",
    "tnc",
    "ldnc",
    "ldigo",
    "ldio",
    "ldgo",
]
# enumerations -> range that holds every value the library could know
SCANNED = {
    "status_t": range(-2, 300),
    "data_type_t": range(-2, 300),
    "format_kind_t": range(-2, 300),
    "format_tag_t": range(-2, 3000),
    "prop_kind_t": range(-2, 300),
    "primitive_kind_t": range(-2, 0x8001),
    "alg_kind_t": range(-2, 0x30100),
    "rnn_flags_t": range(300),
    "rnn_direction_t": range(-2, 300),
    "engine_kind_t": range(-2, 300),
    "fpmath_mode_t": range(-2, 300),
    "scratchpad_mode_t": range(-2, 300),
    "cpu_isa_t": range(-2, 0x2000),
    "cpu_isa_hints_t": range(-2, 300),
}


def told(library: Library, enum: str, value: int) -> str:
    argument = library.ffi.cast("zendnn_" + enum, value)
    return library.ffi.string(library.fn(abi.NAMED_ENUMS[enum][0])(int(argument))).decode()


# ---- enumerations


def test_every_enumeration_the_library_can_name_is_compared() -> None:
    functions = {f for f in abi.declared_functions(declarations("_zendnn")) if f.endswith("2str")}
    compared = {f"zendnn_{function}" for function, _ in abi.NAMED_ENUMS.values()}
    assert functions - compared == {"zendnn_runtime2str"}  # its values are macros: see below
    assert abi.NAMED_ENUMS.keys() == SCANNED.keys()


@pytest.mark.parametrize("enum", SCANNED)
def test_every_declared_value_has_its_name_in_the_library(library: Library, enum: str) -> None:
    spelled = abi.NAMED_ENUMS[enum][1]
    for name, value in library.ctype(enum).relements.items():
        short = name.removeprefix("zendnn_")
        names = {
            spelled.get(n.removeprefix("zendnn_"), n.removeprefix("zendnn_")) for n in names_of(library, enum, value)
        }
        if not short.endswith(("_max", "_last")) or enum == "alg_kind_t":
            assert set(told(library, enum, value).split(" or ")) & names, (name, value)


def names_of(library: Library, enum: str, value: int) -> list[str]:
    return [name for name, v in library.ctype(enum).relements.items() if v == value]


@pytest.mark.parametrize("enum", SCANNED)
def test_every_value_the_library_names_is_declared(library: Library, enum: str) -> None:
    function = library.fn(abi.NAMED_ENUMS[enum][0])
    declared = set(library.ctype(enum).relements.values())
    signed = library.ffi.typeof(library.prefix + enum)
    for value in SCANNED[enum]:
        if value < 0:
            value = int(library.ffi.cast("unsigned int", value)) if "-" not in str(signed.elements) else value
        name = library.ffi.string(function(value)).decode()
        assert name.startswith("unknown") or value in declared, (enum, value, name)


@pytest.mark.parametrize(
    ("macro", "name"),
    [
        ("NONE", "none"),
        ("SEQ", "sequential"),
        ("OMP", "OpenMP"),
        ("TBB", "TBB"),
        ("THREADPOOL", "threadpool"),
        ("OCL", "OpenCL"),
    ],
)
def test_runtime_macros(library: Library, macro: str, name: str) -> None:
    assert library.ffi.string(library.fn("runtime2str")(library.const(f"RUNTIME_{macro}"))).decode() == name


def test_the_library_runs_on_openmp(library: Library) -> None:
    version = library.fn("version")()
    assert version.cpu_runtime == library.const("RUNTIME_OMP")
    assert (version.major, version.minor) in ((5, 0), (5, 1))


# ---- format tags: the layout a tag makes is the one it spells


def spelled_letters(tag: str, domain: str) -> str:
    """Rewrite an alias in a, b, c, ...: nhwc over nchw is acdb."""
    to = {letter: chr(ord("a") + i) for i, letter in enumerate(domain)}
    return "".join(to[c] if c in to else to[c.lower()].upper() if c.lower() in to else c for c in tag)


def canonical(library: Library) -> set[str]:
    return {told(library, "format_tag_t", value) for value in set(TAGS.values())} - {"undef", "any", "format_tag_last"}


def test_there_are_512_layouts_and_475_aliases(library: Library) -> None:
    layouts = canonical(library)
    assert len(layouts) == 512
    assert len(TAGS) - len(layouts) - 3 == 475


# Upstream spells these four unlike the layout they stand for.
ODD = {
    "gIOdhw2i8o16i2o": "aBCdef2c8b16c2b",
    "gIOhw2i8o16i2o": "aBCde2c8b16c2b",
    "gOhwI32o": "aBdec32b",
    "OhwI32o": "Acdb32a",
}


def test_every_alias_spells_its_layout(library: Library) -> None:
    layouts = canonical(library)
    wrong = {}
    for name, value in TAGS.items():
        if name in layouts or name.startswith("format_tag_"):
            continue
        of = told(library, "format_tag_t", value)
        letters = set(re.sub(r"\d", "", name).lower())
        if of not in {spelled_letters(name, domain) for domain in DOMAINS if set(domain) == letters}:
            wrong[name] = of
    assert wrong == ODD


def expected_layout(tag: str, dims: list[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return strides, padded dims, inner blocks and their dimensions, computed from the tag's spelling alone."""
    match = re.fullmatch(r"([a-lA-L]+?)((?:\d+[a-l])*)", tag)
    assert match is not None
    outer, blocks = match.group(1), [(int(n), ord(c) - 97) for n, c in re.findall(r"(\d+)([a-l])", match.group(2))]
    per_dim = [1] * len(dims)
    inner = 1
    for size, dim in blocks:
        per_dim[dim] *= size
        inner *= size
    padded = [-(-d // p) * p for d, p in zip(dims, per_dim, strict=True)]
    strides, step = [0] * len(dims), inner
    for letter in reversed(outer):
        dim = ord(letter.lower()) - 97
        strides[dim] = step
        step *= padded[dim] // per_dim[dim]
    return strides, padded, [size for size, _ in blocks], [dim for _, dim in blocks]


def test_every_layout_is_as_spelled(library: Library) -> None:
    for tag in sorted(canonical(library)):
        ndims = len(re.match(r"[a-lA-L]+?(?=\d|$)", tag).group(0))  # type: ignore[union-attr]
        dims = [[5, 67, 3, 2, 7, 3, 2, 2, 2, 2, 2, 2][i] for i in range(ndims)]
        desc = abi.make_desc(library, tuple(dims), "f32", tag)
        blocking = desc.format_desc.blocking
        strides, padded, sizes, over = expected_layout(tag, dims)
        found = (
            list(blocking.strides)[:ndims],
            list(desc.padded_dims)[:ndims],
            list(blocking.inner_blks)[: blocking.inner_nblks],
            list(blocking.inner_idxs)[: blocking.inner_nblks],
        )
        assert found == (strides, padded, sizes, over), tag
        assert (desc.is_memory_const, desc.is_inplace) == (0, 0)


# ---- structs


FILLED = [
    "memory_desc_t",
    "convolution_desc_t",
    "inner_product_desc_t",
    "matmul_desc_t",
    "eltwise_desc_t",
    "binary_desc_t",
    "softmax_desc_t",
    "logsoftmax_desc_t",
    "softmax_v2_desc_t",
    "embedding_bag_desc_t",
]


def test_every_exported_initialiser_is_tried(library: Library) -> None:
    assert [name for name, _ in abi.fillers(library)] == FILLED


@pytest.mark.parametrize("type_name", FILLED)
def test_extent_written_by_the_library_is_the_declared_size(library: Library, type_name: str) -> None:
    fill = dict(abi.fillers(library))[type_name]
    size = library.ffi.sizeof(library.ctype(type_name))
    assert size - 8 < abi.written_extent(library, type_name, fill) <= size


def test_const_and_in_place_flags_arrive_in_their_bytes(library: Library) -> None:
    dims = (2, 2) + (0,) * 10
    for const, in_place in ((True, False), (False, True), (True, True), (False, False)):
        for name, last in (("by_tag", library.const("ab")), ("by_strides", (2, 1) + (0,) * 10)):
            desc = library.new("memory_desc_t *")
            init = library.fn(f"memory_desc_init_{name}")
            assert init(desc, 2, dims, library.const("f32"), last, const, in_place) == 0
            assert (desc.is_memory_const, desc.is_inplace) == (const, in_place)


def test_c_compiler_lays_the_structs_out_the_same(compile_c) -> None:
    """cffi computes sizes and offsets by itself; a compiler reads the very same declarations."""
    import subprocess

    row = build_ffi.binding("_zendnn")
    text = build_ffi.declarations(row)
    structs = [n for n in FFI.list_types()[0] if FFI.typeof(n).kind in ("struct", "union") and n.endswith(("_t", "_u"))]
    lines = [f'printf("{n} %zu\\n", sizeof({n}));' for n in structs]
    expected = [f"{n} {FFI.sizeof(n)}" for n in structs]
    for name in structs:
        for member, _ in FFI.typeof(name).fields or []:
            lines.append(f'printf("{name}.{member} %zu\\n", offsetof({name}, {member}));')
            expected.append(f"{name}.{member} {FFI.offsetof(name, member)}")
    includes = "#include <stdio.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <stdbool.h>\n"
    program = compile_c(f"{includes}{text}\nint main(void) {{ {' '.join(lines)} return 0; }}\n", shared=False)
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines() == expected


# ---- the check itself: declarations made wrong must be refused


def opened_with(library: Library, change: Any) -> Library:
    """Return the real library seen through altered declarations."""
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(change(build_ffi.declarations(build_ffi.binding("_zendnn"))))
    raw = ffi.dlopen(library.path, ffi.RTLD_LAZY)
    altered = Library(ffi, raw, "zendnn_", library.path, "")
    altered.const = lambda name: library.const(name)  # type: ignore[method-assign]
    return altered


def replaced(old: str, new: str) -> Any:
    def change(text: str) -> str:
        assert text.count(old) >= 1
        return text.replace(old, new, 1)

    return change


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("zendnn_eltwise_clip_v2 = 12", "zendnn_eltwise_clip_v2 = 13", "alg_kind_t 13 is"),
        ("zendnn_s8 = 5,", "zendnn_s8 = 15,", "data_type_t 15 is unknown"),
        ("zendnn_bac, zendnn_bacd,", "zendnn_bacd, zendnn_bac,", "format_tag_t 23 is bac, declared as bacd"),
        ("zendnn_forward_inference = 96", "zendnn_forward_inference = 97", "prop_kind_t 97"),
        ("zendnn_runtime_error = 5", "zendnn_runtime_error = 7", "status_t 7"),
        ("zendnn_cpu_isa_avx2 = 7", "zendnn_cpu_isa_avx2 = 8", "cpu_isa_t 8"),
    ],
)
def test_wrong_enumerator_is_named(library: Library, old: str, new: str, named: str) -> None:
    with pytest.raises(LibraryError, match=re.escape(named)):
        abi.check_enums(opened_with(library, replaced(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("uint8_t is_memory_const, is_inplace;", "", "zendnn_memory_desc_t is 704 bytes long, declared as 696"),
        (
            "uint8_t reluFused, batchNormFused;",
            "uint8_t reluFused, batchNormFused; int64_t more;",
            "zendnn_convolution_desc_t",
        ),
        (
            "float alpha, beta;\n} zendnn_eltwise_desc_t",
            "double alpha, beta;\n} zendnn_eltwise_desc_t",
            "zendnn_eltwise_desc_t",
        ),
        (
            "int softmax_axis;\n} zendnn_softmax_desc_t",
            "int64_t softmax_axis[2];\n} zendnn_softmax_desc_t",
            "softmax_desc_t",
        ),
    ],
)
def test_wrong_struct_is_named(library: Library, old: str, new: str, named: str) -> None:
    with pytest.raises(LibraryError, match=re.escape(named)):
        abi.check_structs(opened_with(library, replaced(old, new)))


def test_right_declarations_pass_the_same_way(library: Library) -> None:
    same = opened_with(library, lambda text: text)
    abi.check_enums(same)
    abi.check_structs(same)


def test_unsupported_version_is_named(library: Library) -> None:
    with pytest.raises(LibraryError, match=r"is version 5\.1\.0; these declarations are for 4\.0 or 5\.2"):
        abi.check_version(library, ((4, 0), (5, 2)))


# ---- the banner's filter

LINE = abi.BANNER + b". Optimized deep learning kernels are now active.\n"


@pytest.mark.parametrize(
    ("written", "left"),
    [
        (b"\n" + LINE + b"\n", b""),
        (LINE, b""),
        (b"mine\n\n" + LINE + b"\nmine too\n", b"mine\nmine too\n"),
        (b"", b""),
        (b"only mine\n\n", b"only mine\n\n"),
        (b"unfinished" + b"\n" + LINE + b"\ntail", b"unfinished\ntail"),
    ],
)
def test_banner_is_cut_out_and_the_rest_kept(written: bytes, left: bytes) -> None:
    assert abi.without_banner(written) == left


def test_module_stub_is_not_taken_for_declarations() -> None:
    with pytest.raises(AttributeError):
        abi.declared_names(types.ModuleType("empty"))
