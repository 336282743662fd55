"""Arguments of nodes and descriptors as JSON, and back.

None, booleans, integers, finite floats and strings are themselves; anything else is a list that begins with a tag:

    (1, 2)            ["tuple", 1, 2]
    a node            ["node", "conv1"]
    torch.bfloat16    ["dtype", "bfloat16"]
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fx_passes.saved.errors import FileError, NotSaved

Special = Callable[[Any], Any]

_OF_TORCH = {"dtype": torch.dtype, "format": torch.memory_format, "layout": torch.layout}
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "list": list}


def encode(value: Any, special: Special) -> Any:
    """Return value as JSON.

    special  asked first: it returns the list for what it knows (nodes, layouts), else None
    Raises   NotSaved for what has no form.
    """
    known = special(value)
    if known is not None:
        return known
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) and type(value) is float else ["float", repr(float(value))]
    if type(value) in (tuple, torch.Size, list, immutable_list):
        tag = "list" if isinstance(value, list) else "tuple"
        return [tag, *(encode(part, special) for part in value)]
    if type(value) in (dict, immutable_dict, OrderedDict):
        tag = "ordered" if type(value) is OrderedDict else "dict"
        return [tag, *([encode(k, special), encode(v, special)] for k, v in value.items())]
    if isinstance(value, slice):
        return ["slice", *(encode(part, special) for part in (value.start, value.stop, value.step))]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, complex):
        return ["complex", repr(value.real), repr(value.imag)]
    if value is Ellipsis:
        return ["ellipsis"]
    for tag, kind in _OF_TORCH.items():
        if isinstance(value, kind):
            return [tag, str(value).removeprefix("torch.")]
    raise NotSaved(f"a {type(value).__name__} among the arguments of an operation")


def decode(data: Any, special: Special) -> Any:
    """Return what encode made data of.

    special  asked first for each list: it returns what its tag stands for, else None
    Raises   FileError for anything else.
    """
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if not isinstance(data, list) or not data or not isinstance(data[0], str):
        raise FileError(f"no value is written as {str(data)[:80]}")
    known = special(data)
    if known is not None:
        return known
    tag, *parts = data
    try:
        return _decoded(tag, parts, special)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise FileError(f"no {tag} is written as {str(data)[:80]}") from error


def _decoded(tag: str, parts: list[Any], special: Special) -> Any:
    if tag in _CONTAINERS:
        return _CONTAINERS[tag]([decode(part, special) for part in parts])
    if tag in ("dict", "ordered"):
        kind = dict if tag == "dict" else OrderedDict
        return kind((decode(k, special), decode(v, special)) for k, v in parts)
    if tag == "slice":
        start, stop, step = (decode(part, special) for part in parts)
        return slice(start, stop, step)
    if tag == "float":
        return float(parts[0])
    if tag == "complex":
        return complex(float(parts[0]), float(parts[1]))
    if tag == "device":
        return torch.device(parts[0])
    if tag == "ellipsis":
        return Ellipsis
    if tag in _OF_TORCH:
        found = getattr(torch, parts[0])
        if isinstance(found, _OF_TORCH[tag]):
            return found
    raise FileError(f"no value is written as {tag}")
