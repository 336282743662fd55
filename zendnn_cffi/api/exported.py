"""Exported programs as models: ExportedProgram, and the files that torch.export.save writes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from fx_passes.trace.guards import Arguments


def as_module(model: Any) -> tuple[nn.Module, Arguments | None]:
    """Return the module to optimize, and the arguments that it was exported with, where a program holds them.

    model   nn.Module, ExportedProgram, or the path of a file
    Raises  TypeError for anything else, FileNotFoundError, ValueError for a file that holds no exported program
    """
    if isinstance(model, nn.Module):
        return model, None
    if isinstance(model, str | os.PathLike):
        model = _load(Path(model))
    if not is_program(model):
        kinds = "a torch.nn.Module, a torch.export.ExportedProgram or the path of a .pt2 file"
        raise TypeError(f"model must be {kinds}, got {type(model).__name__}")
    if model.example_inputs is None:
        return model.module(), None
    from fx_passes.trace.guards import Arguments

    args, kwargs = model.example_inputs
    return model.module(), Arguments(tuple(args), dict(kwargs))


def is_program(model: object) -> bool:
    """Whether it is an ExportedProgram; whoever has one has imported torch.export, which takes a second."""
    module = sys.modules.get("torch.export")
    return module is not None and isinstance(model, module.ExportedProgram)


def _load(path: Path) -> torch.export.ExportedProgram:
    if not path.is_file():
        raise FileNotFoundError(f"no exported program at {str(path)!r}: torch.export.save writes such files")
    try:
        return torch.export.load(path)
    except Exception as error:  # whatever torch.export raises for what it did not write
        raise ValueError(
            f"{str(path)!r} holds no exported program that PyTorch {torch.__version__} can load"
            f" ({type(error).__name__}: {error}); torch.export.save writes such files"
        ) from error
