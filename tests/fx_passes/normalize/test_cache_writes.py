"""Caches of a fixed size that a model writes to: which writes are recognised, and whether all is as eager leaves it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.aliasing.effects import aliases, writes
from fx_passes.aliasing.inputs import WrittenInputs
from fx_passes.normalize.cache_writes import spell_cache_writes
from tests.support.graphs import after, check_twice, count
from tests.support.quantized import ran

HEADS, DEPTH, SIZE = 2, 8, 12
Attend = Callable[..., Tensor]


def assert_close(actual: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Compare tensors, or tuples or lists of them, as rounding of short sums in float32 lets them differ."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


class Layer(nn.Module):
    """One token x [B, 1, 16], caches [B, 2, 12, 8] of keys and values, the places [N] to write to; gives [B, 1, 16]."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
        if x.shape[0] > 99:  # a condition: torch.export follows it, symbolic tracing does not
            x = x * 1
        q, k, v = (m(x).view(x.shape[0], 1, HEADS, DEPTH).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = self.attend(q, k, v, keys, values, index)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


class Layers(nn.Module):
    """Three of them, each with caches of its own."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attend) for _ in range(3))

    def forward(self, x: Tensor, index: Tensor, *caches: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x + layer(x, caches[2 * number], caches[2 * number + 1], index)
        return x


def written(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """As a static cache of Hugging Face."""
    keys.index_copy_(2, index, k)
    values.index_copy_(2, index, v)
    return F.scaled_dot_product_attention(q, keys, values)


def result_read(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, keys.index_copy_(-2, index, k), values.index_copy_(2, index, source=v))


def read_before(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    before = F.scaled_dot_product_attention(q, keys, values)
    return before + written(q, k, v, keys, values, index)


def viewed_before(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    first, second = keys[:, :, 1:], values[:, :, 1:]
    return written(q, k, v, keys, values, index) + F.scaled_dot_product_attention(q, first, second)


def written_twice(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    keys.mul_(0.5), values.mul_(0.5)
    return written(q, k, v, keys, values, index)


def written_again(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    result = written(q, k, v, keys, values, index)
    keys.mul_(0.5), values.mul_(0.5)
    return result


def views_written(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    return written(q, k, v, keys[:, :, 1:], values[:, :, 1:], index)


def own_memory(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    return written(q, k, v, keys * 1, values.clone(), index)


RECOGNISED: dict[str, Attend] = {"written": written, "result read": result_read}
MISSES: dict[str, Attend] = {
    attend.__name__: attend
    for attend in (read_before, viewed_before, written_twice, written_again, views_written, own_memory)
}


def caches(layers: int = 1, batch: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, HEADS, SIZE, DEPTH, generator=generator, dtype=dtype) for _ in range(2 * layers)]


def token(batch: int = 1, seed: int = 1) -> Tensor:
    return torch.randn(batch, 1, 16, generator=torch.Generator().manual_seed(seed))


def place(*at: int) -> Tensor:
    return torch.tensor(at)


def optimized(model: nn.Module, layers: int = 1, **options: Any) -> Any:
    inputs = (token(), place(3), *caches(layers)) if layers > 1 else (token(), *caches(), place(3))
    return zendnn_cffi.optimize(model, inputs, tune="off", **options)


def _kinds(fast: Any) -> list[str]:
    """What programs of all regions call; there is one for each signature."""
    for region in fast.regions().values():
        assert None not in region.lowered.values(), region.name
    return [kind for kind, *_ in ran(fast)]


@pytest.mark.parametrize("example", RECOGNISED)
def test_recognised(example: str) -> None:
    gm = after("normalize", Layer(RECOGNISED[example]).eval(), (token(), *caches(), place(3)))
    (attention,) = gm.graph.find_nodes(op="call_function", target=ops.attention)
    assert all(operand.target is ops.write_at for operand in attention.args[1:3])
    for node in gm.graph.find_nodes(op="call_function", target=ops.write_at):
        assert writes(node, gm) == aliases(node, gm) == [node.args[0]]
    check_twice(gm, spell_cache_writes)


@pytest.mark.parametrize("miss", MISSES)
def test_not_taken_for_it(miss: str) -> None:
    """A region may write twice what it writes: what was there before must not matter to it."""
    model, inputs = Layer(MISSES[miss]).eval(), (token(), *caches(), place(3))
    assert not count(after("spell_cache_writes", model, inputs))["write_at"]
    fast = zendnn_cffi.optimize(model, inputs, tune="off")
    for step in range(2):
        mine, theirs = caches(seed=step), caches(seed=step)
        with torch.no_grad():
            actual, expected = fast(token(), *mine, place(3 + step)), model(token(), *theirs, place(3 + step))
        assert_close(actual, expected)
        assert_close(mine, theirs)


@pytest.mark.parametrize("example", RECOGNISED)
@pytest.mark.parametrize("batch", [1, 3])
def test_one_region_for_all_layers(example: str, batch: int) -> None:
    model = Layers(RECOGNISED[example]).eval()
    fast = zendnn_cffi.optimize(model, (token(batch), place(3), *caches(3, batch)), tune="off")
    mine, theirs = caches(3, batch), caches(3, batch)
    for step in range(6):
        x, at = token(batch, seed=step), place(2 * step % SIZE)
        with torch.no_grad():
            assert_close(fast(x, at, *mine), model(x, at, *theirs))
        assert_close(mine, theirs)
    assert len(fast.regions()) == 1
    assert _kinds(fast).count("write_at") == 6
    assert WrittenInputs(fast).are_shared((token(batch), place(3), *mine[:5], mine[0]), {})


def test_another_layout_of_the_cache_is_written_where_it_lies() -> None:
    model = Layer(written).eval()
    fast = optimized(model)
    for stretch in (
        lambda c: c.transpose(1, 2).contiguous().transpose(1, 2),
        lambda c: torch.zeros(1, HEADS, 2 * SIZE, DEPTH)[:, :, ::2].copy_(c),
        lambda c: torch.zeros(2, HEADS, SIZE, DEPTH)[1:].copy_(c),
    ):
        mine, theirs = ([stretch(c) for c in caches()] for _ in range(2))
        with torch.no_grad():
            assert_close(fast(token(), *mine, place(5)), model(token(), *theirs, place(5)))
        assert_close(mine, theirs)


def test_several_places_at_once() -> None:
    """A prompt: the attention reads more than one row."""

    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.q = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor, keys: Tensor, index: Tensor) -> Tensor:
            if x.shape[0] > 99:
                x = x * 1
            q, k = (m(x).view(1, -1, HEADS, DEPTH).transpose(1, 2) for m in (self.q, self.k))
            return F.scaled_dot_product_attention(q, keys.index_copy_(2, index, k), keys)

    model = Prompt().eval()
    x = torch.randn(1, 4, 16)
    fast = zendnn_cffi.optimize(model, (x, caches()[0], place(4, 1, 7, 0)), tune="off")
    (mine, _), (theirs, _) = caches(), caches()
    with torch.no_grad():
        assert_close(fast(x, mine, place(9, 2, 5, 3)), model(x, theirs, place(9, 2, 5, 3)))
    assert_close(mine, theirs)
    assert "write_at" in _kinds(fast)


def test_bf16_inside_and_a_cache_in_float32() -> None:
    model = Layers(written).eval()
    fast = optimized(model, 3, dtype=torch.bfloat16)
    mine, theirs = caches(3), caches(3)
    with torch.no_grad():
        actual, expected = fast(token(), place(5), *mine), model(token(), place(5), *theirs)
    assert len(fast.regions()) == 1 and _kinds(fast).count("write_at") == 6
    assert_close(actual, expected, rtol=0.05, atol=0.05)
    for cache, other, first in zip(mine, theirs, caches(3), strict=True):
        assert_close(cache, other, rtol=0.05, atol=0.05)
        rest = [i for i in range(SIZE) if i != 5]
        assert torch.equal(cache[:, :, rest], first[:, :, rest]), "nothing else is rounded"


def softcapped(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """Attention that is written out, over heads that are repeated."""
    keys.index_copy_(2, index, k[:, :1])
    values.index_copy_(2, index, v[:, :1])
    wide = [c[:, :, None].expand(-1, -1, HEADS, -1, -1).reshape(-1, HEADS, SIZE, DEPTH) for c in (keys, values)]
    scores = torch.tanh(q @ wide[0].transpose(2, 3) / 5) * 5
    return scores.softmax(-1) @ wide[1]


def test_views_of_a_cache_belong_to_the_region() -> None:
    model = Layers(softcapped).eval()
    given = [[c[:, :1].clone() for c in caches(3)] for _ in range(3)]
    fast = zendnn_cffi.optimize(model, (token(), place(3), *given[0]), tune="off", dynamic=False)
    for step in range(2):
        with torch.no_grad():
            assert_close(fast(token(), place(step), *given[1]), model(token(), place(step), *given[2]))
        assert_close(given[1], given[2])
    assert len(fast.regions()) == 1 and _kinds(fast).count("write_at") == 6


@pytest.mark.parametrize("is_read_inside", [False, True])
def test_a_view_that_is_returned_shares_memory(is_read_inside: bool) -> None:
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.after = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor, keys: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            if x.shape[0] > 99:
                x = x * 1
            keys.index_copy_(2, index, self.k(x).view(1, 1, HEADS, DEPTH).transpose(1, 2))
            seen = keys.transpose(1, 2)
            return (self.after(seen.flatten(2)) if is_read_inside else x + 1), seen

    model = Returned().eval()
    fast = zendnn_cffi.optimize(model, (token(), caches()[0], place(3)), tune="off")
    (mine, _), (theirs, _) = caches(), caches()
    with torch.no_grad():
        actual, expected = fast(token(), mine, place(5)), model(token(), theirs, place(5))
    assert_close(actual, expected)
    assert actual[1].data_ptr() == mine.data_ptr() and actual[1].stride() == expected[1].stride()
    assert_close(mine, theirs)


def test_what_lies_outside_reads_the_cache_itself() -> None:
    """The attention is no operation of the region that writes; the model returns the cache it was given."""

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.after = nn.Linear(16, 16), nn.Linear(8, 8)

        def forward(self, x: Tensor, keys: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            if x.shape[0] > 99:
                x = x * 1
            k = self.k(x).view(1, 1, HEADS, DEPTH).transpose(1, 2)
            keys.index_copy_(2, index, k)
            seen = torch.special.i0(keys).sum(2)
            return self.after(seen), keys, keys.sum()

    model = Outside().eval()
    fast = zendnn_cffi.optimize(model, (token(), caches()[0], place(3)), tune="off")
    (mine, _), (theirs, _) = caches(), caches()
    for step in range(3):
        with torch.no_grad():
            actual, expected = fast(token(), mine, place(step)), model(token(), theirs, place(step))
        assert actual[1] is mine
        assert_close(actual, expected)
        assert_close(mine, theirs)
    assert "write_at" in _kinds(fast)


def test_a_region_that_writes_alone_runs() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = nn.Linear(16, 16)

        def forward(self, x: Tensor, keys: Tensor, index: Tensor) -> Tensor:
            if x.shape[0] > 99:
                x = x * 1
            keys.index_copy_(2, index, self.k(x).view(1, 1, HEADS, DEPTH).transpose(1, 2))
            return index + 1

    model = Writes().eval()
    fast = zendnn_cffi.optimize(model, (token(), caches()[0], place(3)), tune="off")
    (mine, _), (theirs, _) = caches(), caches()
    with torch.no_grad():
        assert torch.equal(fast(token(), mine, place(7)), model(token(), theirs, place(7)))
    assert_close(mine, theirs)
    assert "write_at" in _kinds(fast)


def test_one_cache_for_keys_and_values_is_written_in_turn() -> None:
    """Two inputs in one memory: plain PyTorch, as the graph takes them for different memory."""
    model = Layer(written).eval()
    fast = optimized(model)
    mine, theirs = caches()[0], caches()[0]
    for _ in range(2):
        with torch.no_grad():
            assert_close(fast(token(), mine, mine, place(3)), model(token(), theirs, theirs, place(3)))
        assert_close(mine, theirs)


def test_errors_are_those_of_eager() -> None:
    model = Layer(written).eval()
    fast = optimized(model)
    keys, values = caches()
    inputs: dict[str, tuple[Tensor, ...]] = {
        "an index beyond the end": (keys, values, place(SIZE)),
        "an index that is no int64": (keys, values, place(3).int()),
        "more places than rows": (keys, values, place(3, 4)),
        "another dtype": (keys.double(), values, place(3)),
        "elements that share memory": (keys[:, :, :1].expand(-1, -1, SIZE, -1), values, place(3)),
    }
    for what, given in inputs.items():
        with torch.no_grad():
            with pytest.raises((RuntimeError, IndexError)) as expected:
                model(token(), *given)
            with pytest.raises(type(expected.value)) as actual:
                fast(token(), *given)
        assert str(actual.value) == str(expected.value), what


def test_pytorch_counts_the_write() -> None:
    model = Layer(written).eval()
    fast = optimized(model)
    keys, values = caches()
    with torch.no_grad():
        fast(token(), keys, values, place(3))
        versions = keys._version, values._version
        fast(token(), keys, values, place(4))
    assert keys._version > versions[0] and values._version > versions[1]


def test_caches_made_in_inference_mode() -> None:
    model = Layer(written).eval()
    fast = optimized(model)
    with torch.inference_mode():
        mine, theirs = caches(), caches()
        for step in range(2):
            assert_close(fast(token(), *mine, place(step)), model(token(), *theirs, place(step)))
        assert_close(mine, theirs)
    with torch.no_grad(), pytest.raises(RuntimeError, match="inference tensor"):
        fast(token(), *mine, place(3))


def test_calls_at_once_write_to_caches_of_their_own() -> None:
    model = Layers(written).eval()
    fast = optimized(model, 3)
    mine = [caches(3, seed=n) for n in range(4)]
    theirs = [caches(3, seed=n) for n in range(4)]

    def steps(run: Any, given: list[Tensor], number: int) -> None:
        with torch.no_grad():
            for step in range(SIZE):
                run(token(seed=number), place(step), *given)

    threads = [threading.Thread(target=steps, args=(fast, given, n)) for n, given in enumerate(mine)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, given in enumerate(theirs):
        steps(model, given, number)
    for given, expected in zip(mine, theirs, strict=True):
        assert_close(given, expected)


def test_a_guard_that_fails_writes_once_more() -> None:
    """Sums of exponentials out of range: the region is lowered without that attention, and the call runs again."""
    model = Layers(written).eval()
    fast = zendnn_cffi.optimize(model, (token(), place(3), *caches(3)), tune="full")
    for scale in (1.0, 1e4, 1.0):
        mine, theirs = ([cache * scale for cache in caches(3)] for _ in range(2))
        with torch.no_grad():
            assert_close(
                fast(token(), place(3), *mine), model(token(), place(3), *theirs), rtol=1e-3, atol=1e-3 * scale
            )
        assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * scale)


def test_in_a_file(tmp_path: Path) -> None:
    model = Layers(written).eval()
    fast = optimized(model, 3)
    with torch.no_grad():
        fast(token(), place(3), *caches(3))
    zendnn_cffi.save(fast, tmp_path / "model.safetensors")
    loaded: Any = zendnn_cffi.load(tmp_path / "model.safetensors")
    mine, theirs = caches(3), caches(3)
    for step in range(2):
        with torch.no_grad():
            assert_close(loaded(token(), place(step), *mine), model(token(), place(step), *theirs))
        assert_close(mine, theirs)
    assert _kinds(loaded).count("write_at") == 6
    with torch.no_grad(), pytest.raises(ValueError, match="inputs share memory"):
        loaded(token(), place(3), *mine[:5], mine[0])


@pytest.mark.parametrize("by_compile", [False, True])
def test_caches_that_a_call_makes(by_compile: bool) -> None:
    """As Hugging Face's static caches in the first call: each call has its own, and returns them."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(written) for _ in range(2))

        def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            if x.shape[0] > 99:
                x = x * 1
            made = [torch.zeros(1, HEADS, SIZE, DEPTH) for _ in range(4)]
            for number, layer in enumerate(self.layers):
                x = x + layer(x, made[2 * number], made[2 * number + 1], index)
            return x, *made

    model = First().eval()
    if by_compile:
        fast: Any = torch.compile(model, backend="zendnn", options={"tune": "off"})
    else:
        fast = zendnn_cffi.optimize(model, (token(), place(3)), tune="off")
    before: list[Tensor] = []
    for step in range(3):
        with torch.no_grad():
            actual, expected = fast(token(seed=step), place(step)), model(token(seed=step), place(step))
        assert_close(actual, expected)
        assert {c.data_ptr() for c in before}.isdisjoint(c.data_ptr() for c in actual[1:])
        before = list(actual[1:])
    gm = zendnn_cffi.backend.compiled_modules()[-1] if by_compile else fast
    assert len(gm.regions()) == 1 and set(_kinds(gm)) >= {"write_at"}
    assert _kinds(gm).count("write_at") == 4


def test_through_torch_compile() -> None:
    model = Layers(written).eval()
    compiled = torch.compile(model, backend="zendnn", options={"tune": "off"})  # measured, PyTorch might be faster
    mine, theirs = caches(3), caches(3)
    for step in range(4):
        with torch.no_grad():
            assert_close(compiled(token(), place(step), *mine), model(token(), place(step), *theirs))
        assert_close(mine, theirs)
    gm = zendnn_cffi.backend.compiled_modules()[-1]
    assert len(gm.regions()) == 1 and _kinds(gm).count("write_at") == 6
