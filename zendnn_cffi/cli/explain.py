"""`explain`: a model by name, called once, and what became of each operation."""

from __future__ import annotations

import torch

from zendnn_cffi.cli.models import find


def explain(spec: str, batch: int, dtype: str, threads: int | None, *, profiled: bool) -> int:
    """Print explain(), and profile() where asked for."""
    from fx_passes.report.explain import explain as explain_module
    from fx_passes.report.profile import profile
    from zendnn_cffi.api.optimize import optimize

    if threads:
        torch.set_num_threads(threads)
    found = find(spec, batch)
    wanted = torch.bfloat16 if dtype == "bfloat16" else None
    fast = optimize(found.optimizable, found.example_inputs, dtype=wanted)
    with torch.inference_mode():
        fast(*found.args, **found.kwargs)
    times = profile(fast, *found.args, **found.kwargs) if profiled else None
    print(explain_module(fast))
    if times is not None:
        print(times)
    return 0
