"""Every architecture of Hugging Face's transformers that AutoModel makes, tiny, with random weights.

Its default configuration is shrunk by the names of its numbers. Where they do not fit each other, there is an error,
and the next way shrinks less. A model counts that computes an answer in eager PyTorch.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from demo import vision
from tests.conformance.outcome import brief
from tests.sweep.case import Case, NotRun, Source, parameters_of

_LENGTH, _BATCH, _FRAMES, _SAMPLES, _VOCABULARY, _GRID = 12, 2, 4, 8000, 160, 4
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
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk"), 2),
    **dict.fromkeys(("topk_group", "n_group", "num_group"), 1),
}
_QUERIES = dict.fromkeys(("num_queries", "num_object_queries", "index_topk"), 8)

# Numbers that belong together keep their ratios where all are divided by one power of two.
_PROPORTIONAL = re.compile(r".*(size|dim|dims|width|rank|d_model|d_ff|n_embd|hidden_sizes|channels|section)(_.*)?")
_NOT_PROPORTIONAL = re.compile(
    r".*(vocab|image|patch|kernel|window|batch|chunk|block|group|input|num_|in_|crop|type|pool).*"
)
_DIVISORS = {"an eighth": 8, "a quarter": 4}

_FEW = {**dict.fromkeys(_LAYERS, 2), **_OF_EXPERTS, **_QUERIES}
# What the names of a configuration's numbers become, by way of shrinking.
_RULES: dict[str, dict[str, int]] = {
    "tiny": {
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
    },
    **dict.fromkeys((*_DIVISORS, "few layers"), _FEW),
    "small words": {},
    "as it is": {},
}


def _names() -> dict[str, list[str]]:
    vision.torchvision()  # which transformers imports
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return {name: [name] for name in transformers.CONFIG_MAPPING if name in MODEL_MAPPING_NAMES}


def _build(name: str) -> Case:
    vision.torchvision()
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    why = ""
    for way in _RULES:
        try:
            config = _shrunk(transformers.CONFIG_MAPPING[name](), way)
            parameters_of(partial(transformers.AutoModel.from_config, config), _MOST_PARAMETERS)
            torch.manual_seed(0)
            model = transformers.AutoModel.from_config(config).eval().float()
        except Exception as error:  # numbers that do not fit, packages that are not there
            why = why or brief(error, 120)
            continue
        case = _with_inputs(model)
        if isinstance(case, Case):
            return case
        why = case
    raise NotRun(why)


def _shrunk(config: Any, way: str) -> Any:
    """The configuration and those within it, shrunk."""
    for part in _parts(config):
        values = vars(part)
        for key, new in _RULES[way].items():
            old = values.get(key)
            if isinstance(old, int) and not isinstance(old, bool) and old > new:
                values[key] = new
        if way == "tiny":
            _fit_heads(values)
        if divisor := _DIVISORS.get(way):
            _divide(values, divisor)
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
        elif _PROPORTIONAL.fullmatch(key) and not _NOT_PROPORTIONAL.fullmatch(key):
            values[key] = divided(value)


def _shorten_layers(values: dict[str, Any]) -> None:
    layers = next((values[key] for key in _LAYERS if isinstance(values.get(key), int)), None)
    for key in _LISTS_OF_LAYERS:
        if layers and isinstance(values.get(key), list) and len(values[key]) > layers:
            kinds = list(dict.fromkeys(values[key]))  # one of each kind, if there is room
            values[key] = (kinds + values[key])[:layers]


def _shrink_vocabulary(values: dict[str, Any]) -> None:
    size = values.get("vocab_size")
    if not isinstance(size, int) or size <= _VOCABULARY:
        return
    values["vocab_size"] = _VOCABULARY
    free = _VOCABULARY - 1
    for key, token in values.items():
        if "token" in key and isinstance(token, int) and not isinstance(token, bool) and token >= _VOCABULARY:
            values[key], free = free, free - 1


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _parts(value)


def _with_inputs(model: nn.Module) -> Case | str:
    """The model with arguments that it takes, or the error it raises."""
    why = ""
    for kwargs in _arguments(model):
        try:
            with torch.no_grad():
                torch.manual_seed(0)
                model(**kwargs)
            return Case(model, (), kwargs)
        except Exception as error:  # these are not the arguments
            why = why or brief(error, 120)
    return why or "no arguments known"


def _arguments(model: Any) -> Iterator[dict[str, Any]]:
    """Keyword arguments that may be right: those without defaults, and the main one."""
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    taken = [p.name for p in parameters]
    first = list(dict.fromkeys([*needed, *([model.main_input_name] if model.main_input_name in taken else [])]))
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        first.append("decoder_input_ids")
    masked = [*first, "attention_mask"] if "attention_mask" in taken and first[:1] == ["input_ids"] else first
    both = [*masked, "pixel_values"] if "pixel_values" in taken and "input_ids" in masked else masked
    every = [name for name in ("input_ids", "pixel_values", "input_features", "bbox") if name in taken]
    for names in (both, masked, first, [*dict.fromkeys([*masked, *every])], ["input_ids"], ["pixel_values"]):
        for variant in range(3):
            makers = _makers(model.config, variant, "grid_thw" in needed)
            if names and all(name in makers for name in names):
                with contextlib.suppress(Exception):
                    yield {name: makers[name]() for name in names}


def _of(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first number of this name in the configuration or one within it."""
    for part in _parts(config):
        for name in names:
            value = vars(part).get(name)
            if value is not None and not isinstance(value, bool):
                return value
    return default


def _makers(config: Any, variant: int, in_patches: bool = False) -> dict[str, Callable[[], Tensor]]:
    """Arguments by name; variant: 0 for images, 1 for videos, 2 for images of 64 x 64; in_patches: cut before."""
    size = 64 if variant == 2 else _of(config, ("image_size", "img_size", "input_size"), 64)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = _of(config, ("num_channels", "in_channels", "in_chans"), 3)
    vocabulary = min(int(_of(config, ("vocab_size",), 64)), 100)
    mels = _of(config, ("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels"), 80)
    frames = _of(config, ("num_frames",), _FRAMES)
    hidden = _of(config, ("hidden_size", "d_model", "dim"), 64)
    positions = _of(config, ("max_source_positions",), 50)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def ids(length: int = _LENGTH) -> Tensor:
        return torch.randint(3, max(vocabulary, 5), (_BATCH, length), generator=torch.Generator().manual_seed(1))

    def mask() -> Tensor:
        made = torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
        made[-1, _LENGTH * 2 // 3 :] = 0
        return made

    def images() -> Tensor:
        return noise(1, frames, channels, height, width) if variant == 1 else noise(1, channels, height, width)

    def patches() -> Tensor:
        side, together = _of(config, ("patch_size",), 14), _of(config, ("temporal_patch_size",), 1)
        return noise(_GRID * _GRID, channels * together * side**2)

    def sound() -> Tensor:
        spectrum = (_of(config, ("max_length",), _SAMPLES), mels)
        return noise(_BATCH, *((_SAMPLES,), (1, _SAMPLES), spectrum)[variant])

    def features() -> Tensor:
        return noise(_BATCH, 2 * positions, mels) if variant == 1 else noise(_BATCH, mels, 2 * positions)

    return {
        "input_ids": ids,
        "decoder_input_ids": lambda: ids(5),
        "attention_mask": mask,
        "token_type_ids": lambda: torch.zeros_like(ids()),
        "bbox": lambda: torch.tensor([[[1, 2, 30, 40]]]).expand(_BATCH, _LENGTH, 4).contiguous(),
        "pixel_values": patches if in_patches else images,
        "grid_thw": lambda: torch.tensor([[1, _GRID, _GRID]]),
        "pixel_values_videos": lambda: noise(1, frames, channels, height, width),
        "input_values": sound,
        "input_features": features,
        "inputs_embeds": lambda: noise(_BATCH, _LENGTH, hidden),
        "hidden_states": patches if in_patches else lambda: noise(_BATCH, _LENGTH, hidden),
        "query_embeds": lambda: noise(_BATCH, _LENGTH, hidden),
        "inputs": ids,
        "spectrogram": lambda: noise(_BATCH, 64, mels),
    }


HUGGING_FACE = Source(_names, _build)
