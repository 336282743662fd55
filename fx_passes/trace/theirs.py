"""What is the user's, or another library's, as far as the name of a module tells."""

from __future__ import annotations

import argparse
import types
from typing import Any

import torch
from torch import nn

from zendnn_cffi.errors import is_theirs

_SPACES = (types.SimpleNamespace, argparse.Namespace)
_CODE = (type, types.FunctionType, types.MethodType, types.ModuleType, nn.Module, torch.Tensor)


def holds_fields(value: Any) -> bool:
    """Whether an object holds values in attributes, as a configuration does."""
    return not isinstance(value, _CODE) and (isinstance(value, _SPACES) or is_theirs(type(value).__module__))


def fields_of(value: Any) -> dict[str, Any]:
    """The dictionary of an object that holds values, such as a configuration; {} for what has none."""
    if not holds_fields(value):
        return {}
    fields = getattr(value, "__dict__", None)
    return fields if isinstance(fields, dict) else {}
