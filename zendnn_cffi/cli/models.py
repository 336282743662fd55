"""MODEL of the command line: a model by name, with the arguments of a call."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zendnn_cffi.cli.errors import CommandError
from zendnn_cffi.cli.libraries import imported

_TOKENS, _FRAMES, _SAMPLES = 128, 16, 16000


@dataclass
class Found:
    """A model in evaluation mode, and one call of it.

    program  where it was exported
    batch    samples of the call, where its maker fixed them: then no other batch can be had
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    program: Any = None
    batch: int | None = None

    @property
    def optimizable(self) -> Any:
        """What optimize() takes."""
        return self.program or self.model

    @property
    def example_inputs(self) -> Any:
        """The call, as optimize() takes it."""
        if self.program is not None:
            return None
        return self.kwargs or self.args


def find(spec: str, batch: int = 1) -> Found:
    """Return the model that a name stands for; see `--help`. Random weights are the same each time.

    Raises  CommandError, which says what there is
    """
    torch.manual_seed(0)
    library, _, name = spec.partition(":")
    if not library.strip():
        raise CommandError(
            f"{spec!r} names no model: give a model's name, a file that ends in .pt2, or module:function"
        )
    if spec.endswith(".pt2"):
        return _exported(spec)
    if spec.endswith(".safetensors") and Path(spec).is_file():
        raise CommandError(f"{spec!r} is a file for zendnn_cffi.load: name the model that it was made of")
    if library in _LIBRARIES and name:
        try:
            found = _LIBRARIES[library](name, batch)
        except (ImportError, RuntimeError) as error:
            raise CommandError(f"{_MODULES[library]} does not make {name!r}: {_line(error)}") from error
        if found is None:
            raise CommandError(f"{library} has no model {name!r}{_similar(library, name)}")
        return _in_evaluation(found)
    if name:
        return _in_evaluation(_of_function(library, name, batch))
    tried = []
    for library, make in _LIBRARIES.items():
        try:
            found = make(spec, batch)
        except (ImportError, RuntimeError) as error:  # not there, or built for another PyTorch
            tried.append(f"{_MODULES[library]} does not import: {_line(error)}")
            continue
        if found is not None:
            return _in_evaluation(found)
        tried.append(f"{_MODULES[library]} has none{_similar(library, spec)}")
    raise CommandError(
        f"no model {spec!r} ({'; '.join(tried)}): a file ends in .pt2, a function of yours is module:function"
    )


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _in_evaluation(found: Found) -> Found:
    found.model.eval()
    return found


def _similar(library: str, name: str) -> str:
    try:
        known = imported(_MODULES[library])
        names = known.CONFIG_MAPPING if library == "hf" else getattr(known, "models", known).list_models()
    except (ImportError, RuntimeError):
        return ""
    near = difflib.get_close_matches(name, names, 3)
    return f", near are {', '.join(near)}" if near else ""


def _exported(path: str) -> Found:
    import torch.export

    from fx_passes.trace.quiet import kept_quiet

    if not Path(path).is_file():
        raise CommandError(f"no file {path!r}: torch.export.save writes such files")
    try:
        with kept_quiet():
            program = torch.export.load(path)
    except Exception as error:
        raise CommandError(f"{path!r} holds no exported program that PyTorch {torch.__version__} loads") from error
    if program.example_inputs is None:
        raise CommandError(f"{path!r} holds no example inputs: export the model again with torch.export.export")
    args, kwargs = program.example_inputs
    return Found(Path(path).stem, program.module(), tuple(args), dict(kwargs), program, _batch_of((args, kwargs)))


def _of_function(module: str, name: str, batch: int) -> Found:
    if module.startswith(".") or module.endswith(".py"):
        raise CommandError(f"{module!r} is no module's name: write it as import does, such as folder.file:{name}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        imported_module = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CommandError(f"no module {error.name!r}, asked for by {module}:{name}") from error
    try:
        function = getattr(imported_module, name)
    except AttributeError as error:
        raise CommandError(f"module {module!r} has no function {name!r}") from error
    is_made = isinstance(function, nn.Module | tuple) or not callable(function)  # what a function would return
    made = function if is_made else function()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise CommandError(f"{module}:{name} must return a model, or a model and its arguments; not {type(made)}")
    if isinstance(inputs, dict):
        return Found(name, model, (), inputs, None, _batch_of(inputs))
    if inputs is None:
        return Found(name, model, (noise(batch, 3, 224, 224),))
    args = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    return Found(name, model, args, {}, None, _batch_of(args))


def _batch_of(inputs: Any) -> int:
    """The first size of the first tensor."""
    leaves = torch.utils._pytree.tree_leaves(inputs)
    return next((each.shape[0] for each in leaves if isinstance(each, torch.Tensor) and each.ndim), 1)


def noise(*shape: int) -> torch.Tensor:
    """Return float32 numbers of this shape."""
    return torch.randn(shape, dtype=torch.float32, device="cpu")


def _torchvision(name: str, batch: int) -> Found | None:
    models = imported("torchvision.models")
    if name not in models.list_models():
        return None
    makes = models.get_model_builder(name)
    has_backbone = "weights_backbone" in makes.__code__.co_varnames or hasattr(models.segmentation, name)
    has_backbone = has_backbone or hasattr(models.detection, name)
    model = models.get_model(name, weights=None, **({"weights_backbone": None} if has_backbone else {}))
    size = 299 if name == "inception_v3" else 224
    if hasattr(models.detection, name):
        return Found(name, model, ([noise(3, 320, 320).sigmoid() for _ in range(batch)],))
    if hasattr(models.video, name):
        return Found(name, model, (noise(batch, 3, _FRAMES, size, size),))
    if hasattr(models.optical_flow, name):
        return Found(name, model, (noise(batch, 3, 128, 128), noise(batch, 3, 128, 128)))
    return Found(name, model, (noise(batch, 3, size, size),))


def _timm(name: str, batch: int) -> Found | None:
    timm = imported("timm")
    if not timm.is_model(name):
        return None
    model = timm.create_model(name, pretrained=False)
    return Found(name, model, (noise(batch, *model.default_cfg.get("input_size", (3, 224, 224))),))


def _hugging_face(name: str, batch: int) -> Found | None:
    transformers = imported("transformers")
    if Path(name).is_dir():
        model = transformers.AutoModel.from_pretrained(name, local_files_only=True)
    elif name in transformers.CONFIG_MAPPING:
        model = transformers.AutoModel.from_config(transformers.CONFIG_MAPPING[name]())
    else:
        return None
    return Found(name, model, (), hugging_face_inputs(model, batch))


def hugging_face_inputs(model: Any, batch: int) -> dict[str, torch.Tensor]:
    """Return keyword arguments of a call: 128 tokens, an image or a second of sound for each sample."""
    config, main = model.config, model.main_input_name
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {main: noise(batch, getattr(vision, "num_channels", 3), height, width)}
    if main == "input_values":
        return {main: noise(batch, _SAMPLES)}
    if main != "input_ids":
        raise CommandError(f"{type(model).__name__} takes {main}, which has no example: use module:function")
    length = min(_TOKENS, getattr(config, "max_position_embeddings", _TOKENS) or _TOKENS)
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary, (batch, length), dtype=torch.int64, device="cpu")
    inputs = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids[:, :1]
    return inputs


_MODULES = {"torchvision": "torchvision", "timm": "timm", "hf": "transformers"}
_LIBRARIES = {"torchvision": _torchvision, "timm": _timm, "hf": _hugging_face}
