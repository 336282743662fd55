"""save() and load(): an optimized module in a file, to be started anywhere without tracing, measuring and packing."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fx_passes.module import OptimizedModule
from fx_passes.saved.container import read, write
from fx_passes.saved.document import decode_module, encode_module
from fx_passes.submodule import SubmoduleForward
from zendnn_cffi.collector import collector_paused
from zendnn_cffi.engine.library import is_available, unavailable_reason
from zendnn_cffi.primitives import checks


def save(module: nn.Module, path: str | os.PathLike[str], *, threads: Sequence[int] | None = None) -> None:
    """Write an optimized module to one file: parameters, packed weights, and which implementations were chosen.

    module  what optimize() or load() returned, after a call with each kind of input that is to start fast: shapes and
            dtypes, under torch.set_num_threads of the process that will load it. What was not measured yet is
            measured now. Parameters that were written to since are those of the file. Of a model that is no graph, as
            a detector, its submodules that are: result.backbone. load()'s are put in the places of the original's.
    threads numbers of threads that it is to start fast with (None: those that it was called with)
    path    the file; a safetensors file, in which any reader finds the parameters by their names. It replaces one that
            is there in one step.
    Raises  TypeError for another module; ValueError where the graph calls code that a file does not hold (a submodule
            of the user's that stays plain PyTorch, functions not PyTorch's): optimize what torch.export.export returns,
            which holds operators alone. OSError.
    Warns   UserWarning for each further kind of call whose graph a file does not hold, with the reason. The others are
            in the file.
    """
    given = module.__dict__.get("forward") if isinstance(module, nn.Module) else None
    optimized: Any = given.optimized if isinstance(given, SubmoduleForward) else module
    if not isinstance(optimized, OptimizedModule):
        what = "what zendnn_cffi.optimize returned, or a submodule that it optimized alone"
        raise TypeError(f"module must be {what}, got {type(module).__name__}")
    file, counts = _as_path(path), None if threads is None else _as_counts(threads)
    if not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"no folder {str(file.parent)!r}, where path {str(file)!r} is to be written")
    optimized.follow_changes()
    document, tensors, left_out = encode_module(optimized, counts)
    write(file, document, tensors)
    for kind in left_out:
        warnings.warn(f"zendnn_cffi: for such calls the loaded module raises ValueError: {kind}", stacklevel=2)


def load(path: str | os.PathLike[str], *, verify: bool = True) -> fx.GraphModule:
    """Return the module that save() wrote. Nothing is traced, measured or packed; nothing in the file is run as code.

    path     the file. Its weights are mapped: processes of one machine share them, as long as the file stays.
    verify   whether all data is compared with the sums in the file; False touches no page before it is needed
    Returns  an fx.GraphModule as optimize()'s, with the same state_dict. Calls with inputs like those before it was
             saved, with as many threads, run at once; others are lowered by their first call, as optimize() has it.
             So are all on another kind of CPU or another version of the library, which a warning in the log says.
             Without a library all is plain PyTorch, as optimize() has it, with a RuntimeWarning.
    Raises   FileNotFoundError; FileError (a ValueError) for a file that is damaged, cut off, of another kind or
             version; LibraryError for a file without parameters (release_weights=True) where there is no library.
             Arguments that no graph in the file is right for raise ValueError in the call.
    """
    file = _as_path(path)
    with collector_paused(), torch.inference_mode(False):  # else its parameters would be tensors that count no writes
        document, tensors = read(file, verify)
        module: Any = decode_module(document, tensors)
    if not is_available():
        warnings.warn(
            f"zendnn_cffi: load() returns a module that runs in plain PyTorch: {unavailable_reason()}",
            RuntimeWarning,
            stacklevel=2,
        )
    result: fx.GraphModule = module
    return result


def _as_path(path: Any) -> Path:
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str):
        raise TypeError(f"path must be the path of a file, as text or a pathlib.Path, got {type(path).__name__}")
    return Path(name)


def _as_counts(threads: Any) -> list[int]:
    if isinstance(threads, str) or not isinstance(threads, Iterable):
        raise TypeError(f"threads must be a list of numbers of threads, such as [1, 2], got {threads!r}")
    counts = [checks.as_int(count, "threads", minimum=1) for count in threads]
    if not counts:
        raise ValueError("threads has no number: leave it out for those that the module was called with")
    return counts
