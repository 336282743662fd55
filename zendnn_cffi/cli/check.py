"""`check`: does it work here? Library, ABI, a sample of kernels, small models, peaks."""

from __future__ import annotations

import time
from collections.abc import Callable

from zendnn_cffi.cli.errors import CommandError

_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # largest error relative to the largest result, of three layers


def check(seconds: float) -> int:
    """Print a line per check; return 1 if one failed. seconds: length of the sample of kernels."""
    right = True
    steps: tuple[tuple[str, Callable[[], str]], ...] = (
        ("library", _library),
        ("ABI", _abi),
        ("kernels", lambda: _kernels(seconds)),
        ("models", _models),
        ("peaks", _peaks),
    )
    for name, step in steps:
        begun = time.perf_counter()
        try:
            said, mark = step(), "ok"
        except Exception as error:
            right, mark = False, "FAILED"
            said = " ".join((str(error) if isinstance(error, CommandError) else repr(error)).split())
        print(f"{name:<8} {mark:<6} {time.perf_counter() - begun:5.1f} s  {said}", flush=True)
        if not right and name == "library":
            return 1  # the others need it
    return 0 if right else 1


def _library() -> str:
    from zendnn_cffi.engine.library import load, unavailable_reason

    if reason := unavailable_reason():
        raise CommandError(reason)
    loaded = load()
    return f"ZenDNN {loaded.version} from {loaded.path}"


def _abi() -> str:
    """As loading it did: functions resolve, enumerators have their names, descriptors their sizes."""
    from zendnn_cffi.engine import abi, library

    declared = library.declarations("_zendnn")
    abi.accept(library.load(), declared, library.SUPPORTED_VERSIONS)
    count = len(abi.declared_functions(declared))
    return f"{count} functions, struct sizes and {len(abi.NAMED_ENUMS)} enumerations are as declared"


def _kernels(seconds: float) -> str:
    """Kernels picked from all groups, beside a reference. Those known to be wrong are kept out anyway."""
    from zendnn_cffi.primitives.verification import records
    from zendnn_cffi.primitives.verification.run import sample

    found = sample(seconds)
    known = records.verified(records.machine())
    wrong = [kind for kind, problem in found.items() if problem]
    new = [kind for kind in wrong if known.get(kind) == ""]
    if new:
        raise CommandError(f"{len(new)} kernels are wrong that were right on this kind of CPU, such as {new[0]}")
    return f"{len(found)} kinds ran, {len(found) - len(wrong)} right, {len(wrong)} wrong and never used"


def _models() -> str:
    """A convolutional network and an encoder, beside eager in float64."""
    import torch
    from torch import nn

    from zendnn_cffi.api.optimize import optimize
    from zendnn_cffi.cli.models import noise

    torch.manual_seed(0)
    images = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.ReLU())
    tokens = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 32))
    worst: dict[str, float] = {}
    for model, inputs in ((images, noise(2, 3, 19, 19)), (tokens, noise(2, 7, 64))):
        model.eval()
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            with torch.inference_mode():
                expected = model.double()(inputs.double())
                fast = optimize(model.float(), inputs, dtype=dtype)
                error = ((fast(inputs).double() - expected).abs().max() / expected.abs().max()).item()
            if not error <= _TOLERANCE[name]:
                raise CommandError(f"a small model in {name} is off by {error:.1e}: report it, with `show`")
            worst[name] = max(worst.get(name, 0.0), error)
    return "largest error " + ", ".join(f"{name} {error:.0e}" for name, error in worst.items())


def _peaks() -> str:
    import torch

    from fx_passes.report.peak import peak_gbytes_per_s, peak_gflops

    threads = torch.get_num_threads()
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        rate, name = peak_gflops(dtype, threads), str(dtype).removeprefix("torch.")
        rates.append(f"{rate:,.0f} GFLOP/s {name}" if rate else f"no kernels for {name}")  # they need AVX-512
    return f"{', '.join(rates)}, {peak_gbytes_per_s(threads):.0f} GB/s memory, {threads} threads"
