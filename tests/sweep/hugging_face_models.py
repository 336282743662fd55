"""Every architecture of Hugging Face's transformers that AutoModel makes, tiny, with random weights.

Its default configuration is shrunk by the names of its numbers. Where they do not fit each other, there is an error,
and the next way shrinks less. A model counts that computes an answer in eager PyTorch. Some are written by hand.
"""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Any

import torch

from demo import vision
from tests.conformance.outcome import brief
from tests.sweep.case import Case, NotRun, Source, parameters_of
from tests.sweep.hugging_face_inputs import parts, with_inputs
from tests.sweep.hugging_face_missing import Missing, complete, missing
from tests.sweep.hugging_face_written import WRITTEN
from tests.sweep.statistics_of_norms import with_statistics

_VOCABULARY = 160
_MOST_PARAMETERS = 150_000_000  # most are far smaller
_WIDTHS = (
    "hidden_size",
    "d_model",
    "n_embd",
    "dim",
    "embed_dim",
    "embedding_size",
    "hidden_dim",
    "decoder_hidden_size",
)
_INNER: tuple[str, ...] = (
    "intermediate_size",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "ffn_dim",
    "d_ff",
    "n_inner",
    "ffn_hidden_size",
)
_INNER += (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "mlp_dim",
)
_HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_head", "n_heads", "num_heads")
_LAYERS: tuple[str, ...] = (
    "num_hidden_layers",
    "encoder_layers",
    "decoder_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "depth",
)
_LAYERS += (
    "num_decoder_layers",
    "num_encoder_layers",
)
_LISTS_OF_LAYERS: tuple[str, ...] = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_OF_EXPERTS = {
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("moe_top_k", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("topk_group", "n_group", "num_group"), 1),
}
_QUERIES = dict.fromkeys(("num_queries", "num_object_queries", "index_topk"), 8)

# Numbers that belong together keep their ratios where all are divided by one power of two.
_PROPORTIONAL = re.compile(r".*(size|dim|dims|width|rank|d_model|d_ff|n_embd|hidden_sizes|channels|section)(_.*)?")
_NOT_PROPORTIONAL = re.compile(
    r".*(vocab|image|patch|kernel|window|batch|chunk|block|group|input|num_|in_|crop|type|pool).*"
)
_DIVISORS = {"an eighth": 8, "a quarter": 4}

_FEW = {**dict.fromkeys(_LAYERS, 2), **_OF_EXPERTS, **_QUERIES, "num_kv_shared_layers": 0}
_TINY = {
    **dict.fromkeys(_WIDTHS, 64),
    **dict.fromkeys(_INNER, 96),
    **dict.fromkeys(_HEADS, 4),
    **_FEW,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "rotary_dim": 8,
}
# What the names of a configuration's numbers become, by way of shrinking.
_RULES: dict[str, dict[str, int]] = {
    "tiny": _TINY,
    **dict.fromkeys(_DIVISORS, _FEW),
    "all given": _TINY,
    "few layers": _FEW,
    "small words": {},
    "as it is": {},
}
# Numbers for what is None by default: some configurations expect their users to say it.
_GIVEN: dict[str, Any] = {
    **_TINY,
    "prediction_length": 4,
    "context_length": 16,
    "vocab_size": _VOCABULARY,
    "pad_token_id": 1,
}
_GIVEN |= {"clip_qkv": 8, "vocabulary_map": {"<image>": 3, "IMGIMGA": 4, "IMGIMGB": 5}}


def _names() -> dict[str, list[str]]:
    vision.torchvision()  # which transformers imports
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return {name: [name] for name in transformers.CONFIG_MAPPING if name in MODEL_MAPPING_NAMES}


def _build(name: str) -> Case:
    vision.torchvision()
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    if name in WRITTEN:
        try:
            return with_statistics(WRITTEN[name]())
        except Exception as error:  # another version of transformers has other numbers
            raise NotRun(brief(error, 120)) from error
    why: str = ""
    lacking: Missing = {}
    for way in _RULES:
        found = _made(name, way, lacking)
        while isinstance(found, str) and (more := missing(transformers.CONFIG_MAPPING[name](), found, lacking)):
            lacking = more
            found = _made(name, way, lacking)
        if isinstance(found, Case):
            return with_statistics(found)
        why = why or found
    raise NotRun(why)


def _made(name: str, way: str, lacking: Missing) -> Case | str:
    """The model and arguments that it takes; or why there are none."""
    import transformers

    try:
        config = complete(_shrunk(transformers.CONFIG_MAPPING[name](), way), lacking)
        parameters_of(partial(transformers.AutoModel.from_config, config), _MOST_PARAMETERS)
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config).eval().float()
    except NotRun as error:
        return str(error)
    except Exception as error:  # numbers that do not fit, packages that are not there
        return brief(error, 120)
    return with_inputs(model)


def _shrunk(config: Any, way: str) -> Any:
    """The configuration and those within it, shrunk."""
    for part in parts(config):
        values = vars(part)
        for key, new in _RULES[way].items():
            old = values.get(key)
            if isinstance(old, int) and not isinstance(old, bool) and old > new:
                values[key] = new
        if way == "all given":
            values.update({key: new for key, new in _GIVEN.items() if key in values and values[key] is None})
            if "use_cache" in values:  # of layers that have none to keep
                values["use_cache"] = False
        if way in ("tiny", "all given"):
            _fit_heads(values)
        if divisor := _DIVISORS.get(way):
            _divide(values, divisor)
        if way not in ("small words", "as it is"):
            _fit_states(values)
            _fit_sections(part)
            _fit_groups(values)
        if way != "as it is":
            _shrink_vocabulary(values)
            _shorten_layers(values)
    return config


def _fit_heads(values: dict[str, Any]) -> None:
    """Heads of keys that go with the heads of queries; latent attention has one of each."""
    if "qk_rope_head_dim" in values and values.get("head_dim"):
        values["head_dim"] = values["qk_rope_head_dim"]
    if values.get("num_key_value_heads") and values.get("num_attention_heads"):
        most = values["num_attention_heads"]
        values["num_key_value_heads"] = most if "kv_lora_rank" in values else min(values["num_key_value_heads"], most)


def _fit_states(values: dict[str, Any]) -> None:
    """Heads of a state space model that fill the width that its layers expand to."""
    heads, size, expand = (values.get(f"mamba_{name}") for name in ("n_heads", "d_head", "expand"))
    if isinstance(heads, int) and isinstance(size, int) and expand:
        values["mamba_n_heads"] = max(int(expand * values["hidden_size"]) // size, 1)


def _fit_groups(values: dict[str, Any]) -> None:
    """A convolution's groups that are no more than the channels that are left."""
    if isinstance(values.get("upsample_groups"), int):
        values["upsample_groups"] = min(values["upsample_groups"], values["hidden_size"])


def _fit_sections(config: Any) -> None:
    """Sections of a rotary embedding for time, height and width that fill half of a head."""
    rope = vars(config).get("rope_parameters")
    if "mrope_section" not in (getattr(config, "ignore_keys_at_rope_validation", None) or ()) or not rope:
        return
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    side = half * 3 // 8
    rope["mrope_section"] = [half - 2 * side, side, side]


def _divide(values: dict[str, Any], divisor: int) -> None:
    """Divide all that says how wide a layer is, lists and numbers within dictionaries too, where it leaves no rest."""

    def divided(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(divided, value))
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= divisor and not value % divisor
        return value // divisor if whole else value

    for key, value in values.items():
        if isinstance(value, dict):
            _divide(value, divisor)
        elif isinstance(key, str) and _PROPORTIONAL.fullmatch(key) and not _NOT_PROPORTIONAL.fullmatch(key):
            values[key] = divided(value)


def _shorten_layers(values: dict[str, Any]) -> None:
    layers = next((values[key] for key in _LAYERS if isinstance(values.get(key), int)), None)
    if layers and "layer_types" in values and values["layer_types"] is None:  # it is for users to say
        values["layer_types"] = ["full_attention"] * layers
    for key in _LISTS_OF_LAYERS:
        if layers and isinstance(values.get(key), list) and len(values[key]) > layers:
            kinds = list(dict.fromkeys(values[key]))  # one of each kind, if there is room
            values[key] = (kinds + values[key])[:layers]


def _shrink_vocabulary(values: dict[str, Any]) -> None:
    for key, size in values.items():  # of a second table, for each layer, which is no smaller
        if key.startswith("vocab_size_") and isinstance(size, int) and size > _VOCABULARY:
            values[key] = _VOCABULARY
    size = values.get("vocab_size")
    if not isinstance(size, int) or size <= _VOCABULARY:
        return
    values["vocab_size"] = _VOCABULARY
    free = _VOCABULARY - 1
    for key, token in values.items():
        if "token" in key and isinstance(token, int) and not isinstance(token, bool) and token >= _VOCABULARY:
            values[key], free = free, free - 1


HUGGING_FACE = Source(_names, _build)
