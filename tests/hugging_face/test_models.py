"""Hugging Face models, right and offloaded: through optimize() and through torch.compile."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zendnn_cffi
from benchmarks.workloads_transformers import DecodingStep
from fx_passes import ops
from fx_passes.graph.graph import is_call, is_constant
from fx_passes.report.explanation import NodeExplanation
from fx_passes.saved.errors import NotSaved
from tests.support.graphs import outside
from tests.support.hugging_face import HEADS, LAYERS, MODELS, WIDTH, ids, noise, tensors_of
from zendnn_cffi import backend

pytestmark = pytest.mark.slow


# f32 sums in another order, over a handful of layers
TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def _registered() -> Any:
    backend.register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _assert_close(actual: Any, expected: Any) -> None:
    mine, theirs = tensors_of(actual), tensors_of(expected)
    assert type(actual) is type(expected) and len(mine) == len(theirs) > 0
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert float((a.double() - b.double()).abs().max()) <= TOLERANCE * max(float(b.double().abs().max()), 1.0)


def _optimized(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Callable[..., Any], Callable[[], list[Any]]]:
    fast = zendnn_cffi.optimize(model, inputs, tune="off")
    assert not fast.leaves
    return fast, lambda: [fast]


def _compiled(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Callable[..., Any], Callable[[], list[Any]]]:
    before = set(map(id, backend.compiled_modules()))
    run = torch.compile(model, backend="zendnn", options={"tune": "off"})
    return run, lambda: [m for m in backend.compiled_modules() if id(m) not in before]


WAYS = {"optimize": _optimized, "compile": _compiled}


def _is_linear(node: fx.Node) -> bool:
    """Whether node is a linear that is computed at each call: not one of constants."""
    return is_call(node, ops.linear) and not is_constant(node)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_right_and_offloaded(name: str, way: str) -> None:
    row = MODELS[name]
    model, inputs = row.build(), row.inputs()
    expected = model(**inputs)
    with torch.no_grad():
        run, modules = WAYS[way](model, inputs)
        _assert_close(run(**inputs), expected)
        _assert_close(run(**inputs), expected)
    made: list[NodeExplanation] = []
    for module in modules():
        assert all(lowered for region in module.regions().values() for lowered in region.lowered.values())
        stays = outside(module)
        assert not {"linear", "matmul", "attention", "rms_norm"} & set(stays)
        linears = {(r, n.name) for r, region in module.regions().items() for n in region.graph.nodes if _is_linear(n)}
        made += [node for node in zendnn_cffi.explain(module).nodes if (node.region, node.name) in linears]
    assert len(made) == row.products
    assert all(node.became in ("inner_product", "matmul") and node.implementation != "torch" for node in made), made


def test_a_model_without_no_grad() -> None:
    model, inputs = MODELS["llama"].build(), MODELS["llama"].inputs()
    run, _ = _optimized(model, inputs)
    result = run(**inputs)
    assert not result.logits.requires_grad and all(r.lowered for r in run.regions().values())
    _assert_close(result, model(**inputs))


@pytest.mark.parametrize("way", WAYS)
def test_fifty_lengths_in_a_row(way: str) -> None:
    model = MODELS["bert"].build()
    model.encoder.layer = model.encoder.layer[:1]
    with torch.no_grad():
        run, modules = WAYS[way](model, {"input_ids": ids(9)})
        with zendnn_cffi.warm_up():
            for length in [*range(2, 52), 7]:
                tokens = ids(length, batch=1 + length % 3)
                _assert_close(run(input_ids=tokens), model(input_ids=tokens))
    assert len(modules()) <= 4
    for module in modules():
        for region in module.regions().values():
            assert region.lowered
            assert all(region.lowered.values())


def test_the_cache_that_a_decoder_returns_is_its_own() -> None:
    from transformers import DynamicCache

    model = MODELS["qwen2"].build()
    with torch.no_grad():
        fast, _ = _optimized(model, {"input_ids": ids(9)})
        first, second = fast(input_ids=ids(9)), fast(input_ids=ids(7))
        assert type(first.past_key_values) is DynamicCache
        assert (first.past_key_values.get_seq_length(), second.past_key_values.get_seq_length()) == (9, 7)
        expected = model(input_ids=ids(9))
        for output in (expected, first):  # the model goes on with it
            output.next = model(input_ids=ids(1), past_key_values=output.past_key_values)
        _assert_close(first.next, expected.next)
        assert first.past_key_values.get_seq_length() == 10


def test_a_model_that_returns_a_cache_is_saved_without(tmp_path: Any) -> None:
    model, path = MODELS["llama"].build(), tmp_path / "model.safetensors"
    with torch.no_grad():
        fast, _ = _optimized(model, {"input_ids": ids(9)})
        with pytest.raises(NotSaved, match="DynamicCache; optimize the model with model.config.use_cache = False"):
            zendnn_cffi.save(fast, path)
        model.config.use_cache = False
        fast, _ = _optimized(model, {"input_ids": ids(9)})
        zendnn_cffi.save(fast, path)
        _assert_close(zendnn_cffi.load(path)(input_ids=ids(9)), model(input_ids=ids(9)))


def test_copies_of_a_model_that_returns_a_cache() -> None:
    model = MODELS["llama"].build()
    with torch.no_grad():
        fast, _ = _optimized(model, {"input_ids": ids(9)})
        _assert_close(copy.deepcopy(fast)(input_ids=ids(8)), model(input_ids=ids(8)))


@pytest.mark.parametrize("name", ("llama", "mistral", "qwen2", "phi", "gpt2"))
def test_a_decoding_step_runs_in_one_program(name: str) -> None:
    model = DecodingStep(MODELS[name].build()).eval()
    groups = getattr(model.model.config, "num_key_value_heads", HEADS)
    cache = tuple(noise(1, groups, 6, WIDTH // HEADS) for _ in range(2 * LAYERS))
    fast = zendnn_cffi.optimize(model, (ids(1, 1), *cache), tune="off")
    mine = cache
    with torch.no_grad():
        for step in range(6):
            token = ids(1, 1, seed=step)
            expected, actual = model(token, *cache), fast(token, *mine)
            _assert_close(actual, expected)
            cache, mine = expected[1:], actual[1:]
    (region,) = fast.regions().values()
    (lowered,) = region.lowered.values()
    kinds = Counter(call.kind for call in lowered.program.calls)
    assert (kinds["attention"], kinds["grow"]) == (LAYERS, 2 * LAYERS)
    assert not {"attention", "concat", "linear", "rotary", "rms_norm"} & set(outside(fast))


def test_a_prompt_is_one_region_whatever_its_length() -> None:
    model = MODELS["llama"].build()
    fast = zendnn_cffi.optimize(model, {"input_ids": ids(9, 1)}, tune="off")
    with torch.no_grad():
        for length in (9, 5):
            _assert_close(fast(input_ids=ids(length, 1)), model(input_ids=ids(length, 1)))
    (region,) = fast.regions().values()
    assert len(region.lowered) == 2


@pytest.mark.parametrize("way", ["replace_forward", "optimize"])
def test_layers_that_an_outer_model_collects_outputs_of(way: str) -> None:
    """The outer forward asks for hidden states, and the part that is optimized has the hooks that collect them."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        use_weighted_layer_sum=True,
    )
    model = Wav2Vec2ForSequenceClassification(config).eval()
    eager = copy.deepcopy(model)
    fast: Any = model
    if way == "optimize":
        fast = zendnn_cffi.optimize(model, tune="off")
    else:
        zendnn_cffi.replace_forward(model, tune="off")
    for samples in (2, 2, 3, 2):
        sound = torch.randn(samples, 800)
        with torch.no_grad():
            found = fast(sound).logits
            assert type(found) is Tensor
            _assert_close(found, eager(sound).logits)


def test_a_part_computes_on_the_engine_where_nothing_is_collected() -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99)
    model = BertModel(config).eval()
    eager = copy.deepcopy(model)
    replaced = zendnn_cffi.replace_forward(model.encoder, tune="off")
    given = torch.arange(18).view(2, 9)
    with torch.no_grad():
        for asks in (False, True, True, False, True):
            found, expected = (each(given, output_hidden_states=asks) for each in (model, eager))
            _assert_close(found.last_hidden_state, expected.last_hidden_state)
            if asks:
                _assert_close(found.hidden_states, expected.hidden_states)
    (fast,) = replaced.modules
    assert sum(node.became == "inner_product" for node in zendnn_cffi.explain(fast).nodes) >= 6


@pytest.mark.parametrize("way", ["optimize", "replace_forward"])
@pytest.mark.parametrize("asks", ["output_hidden_states", "output_attentions"])
def test_a_first_call_that_collects_leaves_one_graph_for_each_kind(way: str, asks: str) -> None:
    """Transformers puts its hooks on layers in the first such call: tracing must not take that for state."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=99, attn_implementation="eager", **sizes)
    model = BertForSequenceClassification(config).eval()
    eager, given = copy.deepcopy(model), torch.arange(18).view(2, 9)
    fast: Any = zendnn_cffi.optimize(model, tune="off") if way == "optimize" else model
    replaced = None if way == "optimize" else zendnn_cffi.replace_forward(model, tune="off")
    with torch.no_grad():
        for options in ({asks: True}, {}, {}, {asks: True}, {asks: True}):
            found, expected = fast(given, **options), eager(given, **options)
            assert type(found) is type(expected) and found.keys() == expected.keys()
            for name, value in expected.items():
                _assert_close(found[name], value)
    modules = [fast, *fast.call_kinds.modules] if replaced is None else replaced.modules
    assert len(modules) == 2 and not any(module.leaves for module in modules)
    for module in modules:
        assert sum(node.became == "inner_product" for node in zendnn_cffi.explain(module).nodes) >= 6
