"""One set of declarations, two libraries: oneDNN 2.6 loads, is checked, and computes beside ZenDNN."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zendnn_cffi import engines
from zendnn_cffi.engine import abi
from zendnn_cffi.engine.loaded import Library
from zendnn_cffi.errors import LibraryError

ONEDNN = engines.KINDS["onednn"]
PINNED = f"{ONEDNN.distribution}==2022.2.1"


@pytest.fixture(scope="session")
def onednn() -> Library:
    """oneDNN from its wheel: installed with the test requirements, else fetched by pip into the user's cache once."""
    try:
        return engines.load_engine("onednn")
    except LibraryError:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "zendnn_cffi" / PINNED
        if not list(cache.rglob(ONEDNN.file)):  # pip install --target drops what a wheel puts under lib/
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", cache, PINNED], check=True
            )
            with zipfile.ZipFile(next(cache.glob("*.whl"))) as wheel:
                wheel.extractall(cache)
        return engines.load_engine("onednn", next(cache.rglob(ONEDNN.file)))


@pytest.fixture(params=["zendnn", "onednn"])
def engine(request: pytest.FixtureRequest, library: Library) -> Library:
    return library if request.param == "zendnn" else request.getfixturevalue("onednn")


class Runner:
    """Primitives by the raw calls, written once for both libraries."""

    def __init__(self, library: Library) -> None:
        self.library, self.null, self.keep = library, library.ffi.NULL, []
        self.engine = self.make("engine_create", library.const("cpu"), 0)
        self.stream = self.make("stream_create", self.engine, library.const("stream_default_flags"))

    def make(self, function: str, *arguments: Any) -> Any:
        create = self.library.fn(function)
        out = self.library.ffi.new(self.library.ffi.typeof(create).args[0])
        assert create(out, *arguments) == 0, function
        return out[0]

    def memory(self, desc: Any, tensor: torch.Tensor) -> Any:
        self.keep.append((desc, tensor))
        return self.make("memory_create", desc, self.engine, self.library.ffi.cast("void *", tensor.data_ptr()))

    def run(self, desc: Any, arguments: dict[str, tuple[Any, torch.Tensor]]) -> str:
        fn, const, ffi = self.library.fn, self.library.const, self.library.ffi
        made = self.make("primitive_desc_create", desc, self.null, self.engine, self.null)
        primitive = self.make("primitive_create", made)
        array = self.library.new(
            "exec_arg_t[]", [{"arg": const(f"ARG_{k}"), "memory": self.memory(*v)} for k, v in arguments.items()]
        )
        assert fn("primitive_execute")(primitive, self.stream, len(arguments), array) == 0
        assert fn("stream_wait")(self.stream) == 0
        name = ffi.new("char **")
        assert fn("primitive_desc_query")(made, const("query_impl_info_str"), 0, name) == 0
        implementation = ffi.string(name[0]).decode()
        fn("primitive_destroy")(primitive)
        fn("primitive_desc_destroy")(made)
        return implementation

    def close(self) -> None:
        self.library.fn("stream_destroy")(self.stream)
        self.library.fn("engine_destroy")(self.engine)


@pytest.fixture
def runner(engine: Library) -> Iterator[Runner]:
    runner = Runner(engine)
    yield runner
    runner.close()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def test_matmul_equals_torch(runner: Runner) -> None:
    library, generator = runner.library, torch.Generator().manual_seed(1)
    a, b = torch.randn(17, 33, generator=generator), torch.randn(33, 19, generator=generator)
    bias, out = torch.randn(1, 19, generator=generator), torch.zeros(17, 19)
    descs = [abi.make_desc(library, tuple(t.shape), "f32", "ab") for t in (a, b, bias, out)]
    desc = library.new("matmul_desc_t *")
    assert library.fn("matmul_desc_init")(desc, *descs) == 0
    names = ("SRC", "WEIGHTS", "BIAS", "DST")
    assert runner.run(desc, dict(zip(names, zip(descs, (a, b, bias, out), strict=True), strict=True)))
    assert relative_error(out, a.double() @ b.double() + bias) < 1e-6  # 33 products in f32


def test_convolution_equals_torch(runner: Runner) -> None:
    """nhwc activations, oihw weights, padding 1, dilation 2 (stored less one)."""
    library, generator = runner.library, torch.Generator().manual_seed(2)
    src = torch.randn(2, 3, 9, 11, generator=generator).to(memory_format=torch.channels_last)
    weights, bias = torch.randn(8, 3, 3, 3, generator=generator), torch.randn(8, generator=generator)
    expected = torch.nn.functional.conv2d(src.double(), weights.double(), bias.double(), padding=1, dilation=2)
    out = torch.zeros(expected.shape).to(memory_format=torch.channels_last)
    tags, tensors = ("nhwc", "oihw", "x", "nhwc"), (src, weights, bias, out)
    descs = [abi.make_desc(library, tuple(t.shape), "f32", tag) for t, tag in zip(tensors, tags, strict=True)]
    desc, ones = library.new("convolution_desc_t *"), (1,) * 12
    init = library.fn("dilated_convolution_forward_desc_init")
    kind, how = library.const("forward_inference"), library.const("convolution_direct")
    assert init(desc, kind, how, *descs, ones, ones, ones, ones) == 0
    names = ("SRC", "WEIGHTS", "BIAS", "DST")
    runner.run(desc, dict(zip(names, zip(descs, tensors, strict=True), strict=True)))
    assert relative_error(out, expected) < 1e-6  # 27 products in f32


def test_pooling_by_a_hand_filled_struct_equals_torch(runner: Runner) -> None:
    library = runner.library
    src = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(3))
    out = torch.zeros(2, 16, 4, 4)
    descs = [abi.make_desc(library, tuple(t.shape), "f32", "nchw") for t in (src, out)]
    desc = library.new("pooling_desc_t *")
    desc.primitive_kind, desc.prop_kind = library.const("pooling"), library.const("forward_inference")
    desc.alg_kind, desc.src_desc, desc.dst_desc = library.const("pooling_max"), descs[0][0], descs[1][0]
    desc.strides[0] = desc.strides[1] = desc.kernel[0] = desc.kernel[1] = 2
    runner.run(desc, {"SRC": (descs[0], src), "DST": (descs[1], out)})
    assert torch.equal(out, torch.nn.functional.max_pool2d(src, 2))


def test_eltwise_numbers_moved_between_the_two_are_right_in_each(runner: Runner) -> None:
    """eltwise_clip_v2 is 12 in ZenDNN, 16 in oneDNN."""
    library = runner.library
    src, out = torch.linspace(-2, 2, 40).reshape(5, 8), torch.zeros(5, 8)
    desc, plain = library.new("eltwise_desc_t *"), abi.make_desc(library, (5, 8), "f32", "ab")
    kind, how = library.const("forward_inference"), library.const("eltwise_clip_v2")
    assert library.fn("eltwise_forward_desc_init")(desc, kind, how, plain, -0.5, 1.25) == 0
    runner.run(desc, {"SRC": (plain, src), "DST": (plain, out)})
    assert torch.equal(out, src.clamp(-0.5, 1.25))


def test_onednn_is_checked_like_zendnn(onednn: Library) -> None:
    assert (onednn.version, onednn.prefix, onednn.provider) == ("2.6.0", "dnnl_", "onednn")
    assert onednn.desc_flags == ()
    assert onednn.const("ARG_ATTR_ZERO_POINTS") == 4096
    assert not onednn.has("embedding_bag_desc_init")
    with pytest.raises(AttributeError):
        onednn.const("embedding_bag_sum")


@pytest.mark.parametrize("enum", abi.NAMED_ENUMS)
def test_every_value_onednn_names_is_declared(onednn: Library, enum: str) -> None:
    to_string, declared = onednn.fn(abi.NAMED_ENUMS[enum][0]), set(onednn.ctype(enum).relements.values())
    for value in range(0x30100 if enum == "alg_kind_t" else 3000):
        assert onednn.ffi.string(to_string(value)).decode().startswith("unknown") or value in declared, value


def test_tags_number_the_same_in_both(onednn: Library, library: Library) -> None:
    ours = {n.removeprefix("zendnn_"): v for n, v in library.ctype("format_tag_t").relements.items()}
    theirs = {n.removeprefix("dnnl_"): v for n, v in onednn.ctype("format_tag_t").relements.items()}
    assert ours == theirs
    name = onednn.fn("fmt_tag2str")
    assert [onednn.ffi.string(name(v)) for v in range(514)] == [
        library.ffi.string(library.fn("fmt_tag2str")(v)) for v in range(514)
    ]


def test_engine_is_loaded_once_per_path(onednn: Library, library: Library) -> None:
    assert engines.load_engine("onednn", onednn.path) is onednn
    assert engines.load_engine("zendnn") is library


def test_one_libgomp_serves_all_three(onednn: Library, library: Library) -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = {Path(line.split()[-1]) for line in maps if "libgomp" in line}
    # scikit-learn, which other tests import, brings a private one under a name of its own: libgomp-e985bcbb.so.1.0.0
    assert len({file for file in files if file.name.startswith("libgomp.so")}) == 1


def test_the_wrong_library_is_refused(onednn: Library, library: Library) -> None:
    with pytest.raises(LibraryError, match="lacks 144 of 144 functions"):
        engines.load_engine("zendnn", onednn.path)
    with pytest.raises(LibraryError, match="lacks 136 of 136 functions"):
        engines.load_engine("onednn", library.path)


def test_unknown_engine_and_absent_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="engine 'mkl': choose one of zendnn, onednn"):
        engines.load_engine("mkl")
    with pytest.raises(LibraryError, match=r"none\.so: no such file"):
        engines.load_engine("onednn", tmp_path / "none.so")


def test_missing_distribution_says_what_to_install(monkeypatch) -> None:
    from dataclasses import replace

    with pytest.raises(LibraryError, match="pip install --no-deps not-there==2022.2.1, or give its path"):
        engines.installed(replace(ONEDNN, distribution="not-there"))
