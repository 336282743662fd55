"""Graphs by torch.export: which calls they serve, which sizes are free, what the model's own modes leave behind."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import prune
from torch.utils import _pytree as pytree

import zendnn_cffi
from fx_passes import ops
from fx_passes.pipeline import compile_graph
from fx_passes.trace.export import _constant_of_root
from fx_passes.trace.guards import Guards
from fx_passes.trace.skeleton import Held
from fx_passes.trace.traced import WHOLE
from tests.support.exported import needs_export
from tests.support.graphs import check_equal, count, image, model_of, outside

SHIFT = torch.linspace(-1, 1, 8, dtype=torch.float64)


class Shifts(nn.Linear):
    """A layer whose class holds a tensor."""

    factor = torch.linspace(1, 2, 8, dtype=torch.float64)


def _serves(gm: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the exported graph, and not the model's own forward, computes this call."""
    return gm._source[0].arrange(args, kwargs) is not None


def _branching(function: Any, **children: nn.Module) -> nn.Module:
    """A model that torch.fx cannot trace: for a question of its own."""

    def forward(m: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if needs_export(x) and x.shape[-1] > 1000:
            raise ValueError("too wide")
        return function(m, x, *args, **kwargs)

    return model_of(forward, **children)


def test_hooks_of_submodules_run_at_each_call() -> None:
    """The graph did not run them, and tracing gave them tensors without numbers."""
    model, seen = (
        _branching(lambda m, x: m.b(m.a(x).relu()), a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval(),
        list[Tensor](),
    )
    model.a.register_forward_hook(lambda _m, _args, result: seen.append(result))
    x = torch.randn(3, 8, dtype=torch.float64)
    with torch.no_grad():
        gm = compile_graph(model, (x,))
        for _ in range(3):
            seen.clear()
            torch.testing.assert_close(gm(x), model.b(torch.relu(model.a(x))))
            torch.testing.assert_close(seen[0], seen[1])
            assert len(seen) == 2 and all(type(each) is Tensor for each in seen)


def test_hooks_of_the_model_are_no_part_of_the_graph() -> None:
    """They ran in the graph, and around it once more."""
    model, seen = _branching(lambda m, x: m.a(x), a=nn.Linear(8, 8)), []
    model.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    model.register_forward_hook(lambda *_: seen.append(1))
    model.register_forward_hook(lambda _m, _args, result: 2 * result)
    x = torch.randn(3, 8, dtype=torch.float64)
    with torch.no_grad():
        expected = 2 * model.a(x + 1)
        gm = compile_graph(model, (x,))
        for _ in range(3):
            torch.testing.assert_close(gm(x), expected)
    assert len(seen) == 3 and not outside(gm) and _serves(gm, x)


@pytest.mark.parametrize("affine", (True, False))
def test_rms_norm_is_recognised(affine: bool) -> None:
    """nn.RMSNorm is one operator in exported graphs."""
    parts = {"a": nn.Linear(8, 8), "norm": nn.RMSNorm(8, elementwise_affine=affine), "b": nn.Linear(8, 5)}
    model, x = _branching(lambda m, x: m.b(m.norm(m.a(x))), **parts), torch.randn(2, 3, 8, dtype=torch.float64)
    gm = compile_graph(model, (x,))
    check_equal(model, gm, x)
    assert count(gm.zen_region_0)["rms_norm"] == 1 and not outside(gm)


@pytest.mark.parametrize("reads", ("a global", "a class"))
def test_tensors_of_globals_and_classes_are_followed(reads: str) -> None:
    """Such a tensor has no numbers while torch.export follows the forward. Writes to it are noticed."""
    held, x = SHIFT if reads == "a global" else Shifts.factor, torch.randn(3, 8, dtype=torch.float64)
    model = _branching(lambda m, x: m.a(x) * (SHIFT if reads == "a global" else m.a.factor), a=Shifts(8, 8))
    gm = compile_graph(model, (x,))
    check_equal(model, gm, x)
    assert not outside(gm) and _serves(gm, x)
    before = held.clone()
    try:
        held.add_(1.0)
        check_equal(model, gm, x)
    finally:
        held.copy_(before)


class Step(nn.Module):
    """One token against a cache of any number of layers, each a pair of keys and values given by position."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(layers))
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """x [N, 1, 8], past [N, 2, L, 4] each; returns the result and the grown cache."""
        cache = []
        for layer, keys, values in zip(self.layers, past[::2], past[1::2], strict=True):
            q, k, v = layer(x).view(x.shape[0], 1, 3, 2, 4).permute(2, 0, 3, 1, 4)
            keys, values = torch.cat((torch.cat((torch.tensor([]).to(keys), keys), 2), k), 2), torch.cat((values, v), 2)
            cache += [keys, values]
            x = x + F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).reshape(x.shape)
        return self.out(x), *cache


def _past(length: int, batch: int = 1, layers: int = 2) -> tuple[Tensor, ...]:
    return tuple(image(batch, 2, length, 4, seed=i) for i in range(2 * layers))


@pytest.fixture(scope="module")
def step() -> tuple[nn.Module, Any]:
    model = Step().eval().double()
    return model, compile_graph(model, (image(1, 1, 8), *_past(6)))


@pytest.mark.parametrize(("length", "batch"), [(6, 1), (7, 1), (2, 1), (6, 3), (17, 2)])
def test_arguments_by_star(step: tuple[nn.Module, Any], length: int, batch: int) -> None:
    model, gm = step
    call = image(batch, 1, 8), *_past(length, batch)
    assert not gm.leaves and _serves(gm, *call)
    check_equal(model, gm, *call)


def test_other_calls_run_the_model(step: tuple[nn.Module, Any]) -> None:
    model, gm = step
    x, past = image(1, 1, 8), _past(6)
    assert not _serves(gm, x.float(), *past)
    assert not _serves(gm, x, *past, *past)
    assert not _serves(gm, x.requires_grad_(), *past)
    with torch.no_grad():
        assert _serves(gm, x, *past)
    with torch.autocast("cpu"):
        assert not _serves(gm, x.detach(), *past)
    with pytest.raises(ValueError, match="longer"):
        gm(x, *past, *past)


def test_what_grows_with_the_cache_is_in_regions(step: tuple[nn.Module, Any]) -> None:
    _, gm = step
    assert not outside(gm) and len(gm.regions()) == 1
    inside = Counter(node.target for region in gm.regions().values() for node in region.graph.nodes)
    assert (inside[ops.grow], inside[ops.cached_attention]) == (4, 2)
    assert inside[ops.concat] == inside[ops.attention] == 0


def test_a_batch_of_one_in_the_example_serves_any() -> None:
    model = _branching(lambda m, x: m.l(x).reshape(x.shape[0], -1).relu(), l=nn.Linear(5, 4))
    gm = compile_graph(model, (image(1, 3, 5),))
    for batch, length in [(1, 3), (4, 3), (2, 7)]:
        assert _serves(gm, image(batch, length, 5))
        check_equal(model, gm, image(batch, length, 5))


def test_a_size_that_the_model_compares_with_one_is_kept() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.l(x) if x.shape[1] == 1 else m.l(x).cumsum(1)

    model = _branching(forward, l=nn.Linear(5, 4))
    gm = compile_graph(model, (image(2, 1, 5),))
    assert _serves(gm, image(3, 1, 5)) and not _serves(gm, image(3, 2, 5))
    check_equal(model, gm, image(3, 2, 5))


@pytest.mark.parametrize("how", ("two arguments", "in a list"))
def test_one_tensor_in_two_places_of_the_example_is_two(how: str) -> None:
    """torch.export reads one of them for both: attention that was traced by f(x, x) ignored the first of f(x, y)."""
    model = _branching(lambda m, x, y, z: m.a(x) - y * 2.0 + z[0], a=nn.Linear(8, 8))
    x, y, z = torch.randn(3, 3, 8, dtype=torch.float64).unbind()
    examples = {"two arguments": (x, x, [z]), "in a list": (x, y, [x])}
    gm = compile_graph(model, examples[how])
    for args in ((x, y, [z]), (x, x, [z]), (x, y, [x])):
        assert _serves(gm, *args)
        check_equal(model, gm, *args)


def test_sizes_that_passed_are_not_checked_again() -> None:
    asked: list[tuple[int, ...]] = []

    def check(x: Tensor, y: Tensor) -> None:
        asked.append(tuple(x.shape))
        assert x.shape[0] > 1

    guards = Guards(check, ((image(2, 5), image(3)), {}))
    for _ in range(2):
        assert guards.hold((image(2, 5), image(3)), {})
        assert guards.hold((image(7, 5), image(3)), {})
        assert not guards.hold((image(1, 5), image(3)), {})
    assert asked == [(2, 5), (7, 5), (1, 5), (1, 5)]
    for n in range(2, 2000):
        assert guards.hold((image(n, 1), image(3)), {})
    assert len(guards._passed) <= 1024


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_zero_of_the_other_sign_is_another_number(zero: float) -> None:
    def forward(m: Any, x: Tensor, factor: float) -> Tensor:
        y = m.l(x) if needs_export(x) and x.shape[0] < 100 else x  # symbolic tracing ends here
        return y * factor

    model = model_of(forward, l=nn.Linear(5, 4))
    gm = compile_graph(model, (image(2, 5), zero))
    for other in (zero, -zero):
        assert _serves(gm, image(2, 5), other) == (other is zero)
        with torch.no_grad():
            signs = [module(image(2, 5), other).signbit() for module in (gm, model)]
        assert torch.equal(*signs)


def test_arguments_that_are_no_tensors_are_part_of_the_graph() -> None:
    def forward(m: Any, x: Tensor, *, scale: float = 1.0, extra: Any = None) -> dict[str, Any]:
        y = m.l(x) * scale if needs_export(x) and x.shape[0] < 100 else m.l(x)
        return {"y": y if extra is None else y + extra["mask"], "none": None}

    model = model_of(forward, l=nn.Linear(5, 4))
    gm = compile_graph(model, {"x": image(2, 5), "scale": 2.0, "extra": {"mask": image(2, 4)}})
    assert not gm.leaves
    for kwargs, serves in [
        ({"scale": 2.0, "extra": {"mask": image(3, 4, seed=1)}}, True),
        ({"extra": {"mask": image(3, 4)}, "scale": 2.0}, True),
        ({"scale": 3.0, "extra": {"mask": image(3, 4)}}, False),
        ({"scale": 2.0, "extra": None}, False),
        ({"scale": 2.0}, False),
    ]:
        assert _serves(gm, x=image(3, 5), **kwargs) == serves
        check_equal(model, gm, x=image(3, 5), **kwargs)


def test_keywords_by_two_stars() -> None:
    model = _branching(lambda m, x, *, scale: m.l(x) * scale, l=nn.Linear(5, 4))
    gm = compile_graph(model, {"x": image(2, 5), "scale": 2.0})
    assert not gm.leaves and _serves(gm, x=image(2, 5), scale=2.0)
    for rows, scale in [(2, 2.0), (2, 3.0), (3, 2.0)]:  # torch.export keeps the sizes of such calls
        check_equal(model, gm, x=image(rows, 5), scale=scale)


def test_modes_inside_the_model_leave_no_trace() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x.detach() * 0.5).tanh()
        with torch.autocast("cpu", enabled=False):
            y = m.l(x) + scale
        with torch.enable_grad():
            return m.k(y).relu()

    model = _branching(forward, l=nn.Linear(5, 5), k=nn.Linear(5, 3))
    gm = compile_graph(model, (image(2, 5),))
    assert not gm.leaves and not outside(gm) and count(gm)["linear"] == 2
    check_equal(model, gm, image(3, 5))
    again = copy.deepcopy(gm)
    check_equal(model, again, image(3, 5))


def test_autocast_that_is_on_inside_stays_outside() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.l(x)
        return m.k(y.float())

    model = _branching(forward, l=nn.Linear(5, 5), k=nn.Linear(5, 3)).float()
    gm = compile_graph(model, (image(2, 5).float(),))
    assert "wrap_with_autocast" in outside(gm) and count(gm)["linear"] == 1
    with torch.no_grad():
        assert torch.equal(gm(image(3, 5).float()), model(image(3, 5).float()))


def test_gradients_are_the_models_own() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.l(x) * x.detach()

    model = _branching(forward, l=nn.Linear(5, 5))
    gm = compile_graph(model, (image(2, 5),))
    results = []
    for module in (model, gm):
        x = image(2, 5).requires_grad_()
        module(x).sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)
    assert not gm(image(2, 5)).requires_grad


def test_a_constant_that_forward_makes_of_an_attribute_that_was_changed() -> None:
    """torch.export gives it the name that another one had: the graph made again read the first numbers."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale = nn.Linear(8, 8), 0.5

        def forward(self, x: Tensor) -> Tensor:
            if needs_export(x) and x.shape[-1] > 1000:
                raise ValueError("too wide")
            return self.first(x) * torch.tensor([self.scale, 2.0 * self.scale] * 4)

    model, x = Scaled().eval(), torch.randn(3, 8)
    gm: Any = compile_graph(model, (x,))
    for scale in (0.5, 3.0, 0.5, float("nan")):
        gm.scale = model.scale = scale
        for _ in range(3):
            torch.testing.assert_close(gm(x), model(x), equal_nan=True)
        assert _serves(gm, x)


def test_a_constant_that_forward_makes_and_writes_stays_a_copy() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        counts = torch.tensor([1.0, 2.0], dtype=torch.float64)
        counts.add_(x.sum())
        return m.l(x) + counts + torch.tensor([3.0, 4.0], dtype=torch.float64)

    model = _branching(forward, l=nn.Linear(5, 2))
    gm = compile_graph(model, (image(2, 5),))
    for _ in range(2):
        check_equal(model, gm, image(2, 5))
    assert outside(gm)["lift_fresh_copy.default"] <= 1


class Box:
    """An object that torch.export does not know."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


OBJECTS: dict[str, Any] = {
    "tensors and numbers": lambda y: Box(y=y, name="box", dtype=y.dtype, shape=tuple(y.shape), missing=None),
    "in containers": lambda y: {"all": [Box(y=y), (Box(y=y + 1), y)]},
    "nested": lambda y: Box(inner=Box(many=[Box(y=y)], cls=Box), flag=True),
}


def _opened(value: Any) -> Any:
    """value with objects as (class, attributes)."""
    if isinstance(value, Box):
        return type(value), _opened(vars(value))
    if isinstance(value, dict):
        return {k: _opened(v) for k, v in value.items()}
    return type(value)(map(_opened, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_in_the_output(kind: str) -> None:
    model = _branching(lambda m, x: OBJECTS[kind](m.l(x)), l=nn.Linear(5, 4))
    gm = compile_graph(model, (image(2, 5),))
    assert not gm.leaves
    for module in (gm, copy.deepcopy(gm)):
        for rows in (2, 4):
            x = image(rows, 5)
            assert _serves(module, x)
            with torch.no_grad():
                actual, expected = _opened(module(x)), _opened(model(x))
            mine, structure = pytree.tree_flatten(actual)
            theirs, other = pytree.tree_flatten(expected)
            assert structure == other
            for a, b in zip(mine, theirs, strict=True):
                assert torch.allclose(a, b) if isinstance(b, Tensor) else a == b
    assert gm(image(2, 5)) is not gm(image(2, 5))


REFUSED: dict[str, Any] = {
    "slots": lambda m, y: Slotted(y),
    "one object twice": lambda m, y: (b := Box(y=y), b),
    "a module": lambda m, y: (y, m.l),
    "a function": lambda m, y: Box(y=y, f=lambda: y),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_objects_that_are_not_taken_apart_leave_the_model_whole(kind: str) -> None:
    model = _branching(lambda m, x: REFUSED[kind](m, m.l(x)), l=nn.Linear(5, 4))
    gm = compile_graph(model, (image(2, 5),))
    assert "in the output" in gm.leaves[WHOLE]
    assert type(gm(image(2, 5))) is type(model(image(2, 5)))


def _encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options.get("norm_first"))


ENCODERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "normalization last": (lambda m, x: m.e(x), {}),
    "normalization first": (lambda m, x: m.e(x), {"norm_first": True, "activation": "gelu"}),
    "a mask": (lambda m, x: m.e(x, mask=torch.ones(5, 5, dtype=torch.bool).triu(1), is_causal=False), {}),
    "causal": (
        lambda m, x: m.e(x, mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=x.dtype), is_causal=True),
        {},
    ),
}


@pytest.mark.parametrize("case", ENCODERS)
def test_transformer_encoders_are_taken_apart(case: str) -> None:
    function, options = ENCODERS[case]
    model = model_of(function, e=_encoder(**options))
    gm = compile_graph(model, (image(2, 5, 16),))
    assert not gm.leaves and not {"linear", "attention", "squeeze.dim"} & set(outside(gm))
    made = count(gm)
    assert (made["linear"], made["attention"], made["layer_norm"]) == (8, 2, 4)
    for batch in (2, 3, 7):
        assert _serves(gm, image(batch, 5, 16))
        check_equal(model, gm, image(batch, 5, 16))
    assert torch.backends.mha.get_fastpath_enabled()


def test_without_example_inputs_an_encoder_is_one_module() -> None:
    model = model_of(lambda m, x: m.e(x), e=_encoder())
    gm = compile_graph(model)
    assert outside(gm) == {"e": 1}
    check_equal(model, gm, image(2, 5, 16))


def test_a_mask_that_the_encoder_looks_into() -> None:
    model = model_of(lambda m, x: m.e(x, mask=torch.ones(5, 5, dtype=torch.bool).triu(1)), e=_encoder())
    gm = compile_graph(model, (image(2, 5, 16),))
    assert not gm.leaves and count(gm)["attention"] == 2  # whether the mask is causal changes no number
    check_equal(model, gm, image(2, 5, 16))


def test_a_decoder_and_attention_in_a_model_that_is_exported() -> None:
    decoder = nn.TransformerDecoderLayer(16, 4, 24, batch_first=True)
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    model = model_of(lambda m, x: m.d(x, m.a(x, x, x)[0]), d=decoder, a=attention)
    gm = compile_graph(model, (image(2, 5, 16),))
    assert not gm.leaves and count(gm)["attention"] >= 2 and not {"linear", "attention"} & set(outside(gm))
    check_equal(model, gm, image(3, 5, 16))


OPERATORS: dict[str, Any] = {
    "a border": lambda m, x: F.pad(m.c(x), (0, 1, 0, 1)) * 2,
    "a border up to a multiple": lambda m, x: F.pad(m.c(x), (0, (4 - x.shape[3] % 4) % 4, 0, -x.shape[2] % 4)) * 2,
    "no border": lambda m, x: F.pad(m.c(x), (0, 0, 0, 0)) * 2,
    "a product added to something": lambda m, x: torch.baddbmm(x[0], x[0], x[0].transpose(1, 2) @ x[0], alpha=0.5),
    "einsum": lambda m, x: torch.einsum("bcij,bckj->bcik", x, m.c(x)[:, :3]).relu(),
    "adaptive maximum": lambda m, x: F.adaptive_max_pool2d(m.c(x), 1).flatten(1),
}


@pytest.mark.parametrize("kind", OPERATORS)
def test_operators_of_exported_graphs(kind: str) -> None:
    """Each is in a region, as it is where torch.fx traces."""
    model, x = _branching(OPERATORS[kind], c=nn.Conv2d(3, 4, 3, padding=1)), image(2, 3, 9, 9)
    gm = compile_graph(model, (x,))
    check_equal(model, gm, x)
    assert _serves(gm, x)
    assert not set(outside(gm)) - {"getitem", "slice", "index", "narrow", "transpose"}


def test_free_image_sizes_do_not_count_as_a_cache() -> None:
    """A classifier has a linear, but only behind its pooling: no linear has the image's sizes, its convolutions do."""
    parts = {"stem": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "head": nn.Linear(4, 5)}
    model = _branching(lambda m, x: m.head(torch.relu(m.norm(m.stem(x))).mean((2, 3))), **parts)
    gm = compile_graph(model, (image(2, 3, 9, 7),))
    check_equal(model, gm, image(2, 3, 9, 7))
    check_equal(model, gm, image(1, 3, 12, 8))
    assert _serves(gm, image(1, 3, 12, 8))
    assert not outside(gm)
    assert len(gm.regions()) == 1


TEXTS: dict[str, Any] = {
    "format": lambda x: f"{x.shape[0]} rows",
    "all sizes": lambda x: str(x.shape),
    "key": lambda x: {repr(x.size(0)): 1},
    "length": lambda x: "of " + str(len(x)),
}


@pytest.mark.parametrize("write", TEXTS.values(), ids=TEXTS.keys())
def test_sizes_in_text_are_numbers(write: Any) -> None:
    model = _branching(lambda m, x: (m.l(x), write(x)), l=nn.Linear(5, 4))
    gm = compile_graph(model, (image(2, 5),))
    for rows in (2, 3, 2):
        x = image(rows, 5)
        assert gm(x)[1] == model(x)[1]
        torch.testing.assert_close(gm(x)[0], model(x)[0])
    assert not gm.leaves


def test_sizes_in_messages_stay_free() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        logging.getLogger("a model").debug(f"{x.shape[0]} rows")
        return m.l(x)  # type: ignore[no-any-return]

    gm = compile_graph(_branching(function, l=nn.Linear(5, 4)), (image(2, 5),))
    assert _serves(gm, image(2, 5)) and _serves(gm, image(3, 5))


CHANGES = {
    "append": lambda m, x, held: held["several"].append(m.l(x)),
    "item": lambda m, x, held: held.update(out=m.l(x)),
    "pop": lambda m, x, held: held["several"].pop(),
    "exchange": lambda m, x, held: held["several"].__setitem__(0, m.l(x)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_containers_of_the_caller_that_are_changed(kind: str) -> None:
    model = _branching(lambda m, x, held: (CHANGES[kind](m, x, held), m.l(x))[1], l=nn.Linear(5, 4))
    x = image(2, 5)
    gm = compile_graph(model, (x, {"several": [x]}))
    for _ in range(2):
        mine, theirs = {"several": [x]}, {"several": [x]}
        torch.testing.assert_close(gm(x, mine), model(x, theirs))
        assert mine.keys() == theirs.keys() and len(mine["several"]) == len(theirs["several"])
        for one, other in zip(pytree.tree_leaves(mine), pytree.tree_leaves(theirs), strict=True):
            torch.testing.assert_close(one, other)


class Padded(nn.Module):
    """torch.fx cannot trace it; its layer's weight is computed by a hook before each call."""

    def __init__(self, computing: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.conv = computing(nn.Conv1d(4, 8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if needs_export(x) and x.shape[-1] < 10:
            x = F.pad(x, (0, 10))
        return F.relu(self.conv(x))


@pytest.mark.parametrize(
    ("computing", "parameter"),
    [
        (torch.nn.utils.weight_norm, "weight_g"),
        (torch.nn.utils.spectral_norm, "weight_orig"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "weight_orig"),
    ],
    ids=["weight_norm", "spectral_norm", "pruning"],
)
def test_weights_that_hooks_compute_are_in_exported_graphs(computing: Any, parameter: str) -> None:
    """They counted as state that a forward changes: the layer stayed plain PyTorch."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Padded(computing)).eval(), torch.randn(2, 4, 40)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x))
            assert "convolution" in [node.became for node in zendnn_cffi.explain(fast).nodes]
            assert type(model[0].conv.weight) in (torch.Tensor, nn.Parameter) and model[0].conv.weight.is_cpu
            getattr(model[0].conv, parameter)[1:3] *= 3


def test_tensors_of_layers_that_a_slice_gave_are_put_on_the_model() -> None:
    """torch.export names them by the slice, as layers.slice(None, 1, None).0: no path of the model's."""
    root, gm = nn.Module(), fx.GraphModule(nn.Module(), fx.Graph())
    part = nn.Module()
    part.add_module("slice(None, 1, None)", inner := nn.Module())
    inner.lifted = torch.ones(2)
    gm.layers = part
    root.layers = nn.Module()
    target = "layers.slice(None, 1, None).lifted"
    held = Held(root, root)
    assert _constant_of_root(root, target, gm, held) == "lifted" == _constant_of_root(root, target, gm, held)
    assert torch.equal(root.lifted, torch.ones(2))
    inner.lifted = torch.zeros(2)
    assert (name := _constant_of_root(root, target, gm, held)) != "lifted"
    assert torch.equal(getattr(root, name), torch.zeros(2))
