"""`show`: show_config(), and what is known of this kind of CPU."""

from __future__ import annotations

import json

from zendnn_cffi.api.config import describe
from zendnn_cffi.engine import host
from zendnn_cffi.engine.folders import cache_folder
from zendnn_cffi.engine.library import is_available


def facts() -> dict[str, str]:
    """Return what `show` prints, as ordered name -> text."""
    found = describe()
    found["cpu kind"] = host.cpu_generation()
    found["usable cpus"] = str(host.usable_cpus())
    found["cache"] = str(cache_folder() or "off (ZENDNN_CFFI_CACHE is empty, or there is no home)")
    if is_available():
        found |= _known()
    return found


def _known() -> dict[str, str]:
    """What ships with the package for this kind of CPU."""
    import torch

    from fx_passes.search import shipped
    from zendnn_cffi.primitives.verification import records

    name, threads = records.machine(), torch.get_num_threads()
    verified, times = records.verified(name).about, shipped.times_for(threads)
    return {
        "known as": name,
        "verified": f"{verified['kinds']:,} kinds of kernels ran beside a reference on this kind of CPU"
        if verified.get("kinds")
        else "not on this kind of CPU: each kernel is checked before its first use",
        "shipped times": f"{len(times):,} of {threads} threads, {times.about.get('cpu', 'unknown CPU')}"
        if times
        else f"none of this kind of CPU with {threads} threads: first calls measure",
    }


def show(*, as_json: bool = False) -> int:
    """Print the facts."""
    found = facts()
    width = max(map(len, found))
    print(json.dumps(found, indent=1) if as_json else "\n".join(f"{k:<{width}}  {v}" for k, v in found.items()))
    return 0
