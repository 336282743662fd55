"""Libraries of models, also where torchvision's compiled operators do not fit the installed PyTorch."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

# torchvision's import describes operators of its compiled part, which one built for CUDA does not load beside a PyTorch
# for CPUs. No classification model calls them: that they exist by name is enough. timm and transformers import it, too.
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")
_declared: list[torch.library.Library] = []  # kept: the operators live as long


def imported(name: str) -> ModuleType:
    """Return a module of torchvision, timm or transformers.

    Raises  ImportError, RuntimeError where it is not there or does not import
    """
    if not _declared:
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            _declare()
        except ImportError:
            pass  # timm says so itself, transformers does without
    return importlib.import_module(name)


def _declare() -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
        del sys.modules[module]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in _OPERATORS:
        library.define(operator + _SCHEMA)
    _declared.append(library)
