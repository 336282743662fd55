"""Can the engine run here: operating system, architecture, CPU instructions."""

from __future__ import annotations

import os
import platform
import struct
import sys
from functools import lru_cache
from pathlib import Path

# The library chooses its kernels at run time, from AVX2 up. On an emulated Haswell (no AVX-512) convolution, matmul,
# pooling, embedding_bag and both gemm families gave right results; an emulated Sandy Bridge (AVX only) died of SIGILL.
REQUIRED_FLAGS = ("avx2", "fma", "bmi2", "f16c")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE_BYTES = 32 << 20


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Return the CPU's feature flags as Linux names them; empty where they cannot be read."""
    return frozenset(_cpu_fact("flags").split())


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """Return the CPU's name, "unknown" where it cannot be read."""
    return _cpu_fact("model name") or platform.processor() or "unknown"


_ZEN = {23: "zen2", 25: "zen3", 26: "zen5"}  # by CPU family; the first Zen runs the same code as the second


@lru_cache(maxsize=1)
def cpu_generation() -> str:
    """Return what kernels depend on: "zen4" and the like, else vendor, family and vectors, as "intel-6-avx512"."""
    vendor = _cpu_fact("vendor_id").removeprefix("Genuine").removeprefix("Authentic").lower() or "unknown"
    family = _cpu_fact("cpu family")
    wide = "avx512f" in cpu_flags()
    if vendor == "amd" and family.isdigit() and int(family) in _ZEN:
        return "zen4" if int(family) == 25 and wide else _ZEN[int(family)]
    return f"{vendor}-{family or '0'}-{'avx512' if wide else 'avx2'}"


@lru_cache(maxsize=1)
def last_cache_bytes() -> int:
    """Return the size of the largest cache that the first CPU reads through; 32 MiB where it cannot be read."""
    sizes = [_size_bytes(path) for path in _CACHES.glob("index*/size")]
    return max(sizes, default=0) or _USUAL_CACHE_BYTES


def _size_bytes(path: Path) -> int:
    """What a file says as "32768K", 0 where it says something else."""
    try:
        text = path.read_text(encoding="utf-8").strip()
        return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
    except (OSError, ValueError):
        return 0


def usable_cpus() -> int:
    """Return how many CPUs this process may use at once: its affinity, and the quota of its control groups."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        allowed = os.cpu_count() or 1
    quotas = [quota for quota in map(_quota, _control_groups()) if quota]
    return max(1, min([allowed, *(int(quota + 0.01) for quota in quotas)]))


def _control_groups() -> list[Path]:
    """The folders of the control groups that limit this process' time: of version 2 and 1, up to the outermost."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = _CONTROL_GROUPS / (controllers and "cpu")
        path = mounted / inside.strip("/")
        found += [folder for folder in (path, *path.parents) if folder == mounted or mounted in folder.parents]
    return found


def _quota(folder: Path) -> float:
    """How many CPUs' time a control group gives, 0 where it sets no limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period")
            )
        return max(0.0, int(quota) / int(period))
    except (OSError, ValueError):  # "max" is no number
        return 0.0


def _cpu_fact(name: str) -> str:
    """Return a line of /proc/cpuinfo, empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    line = next((line for line in text.splitlines() if line.startswith(name)), "")
    return line.partition(":")[2].strip()


def unsuitable_reason() -> str | None:
    """Return why no engine can run on this machine, None if one can."""
    system, machine = sys.platform, platform.machine()
    if system != "linux" or machine not in ("x86_64", "AMD64") or struct.calcsize("P") != 8:
        return f"the engine is built for 64-bit Linux on x86-64; this is {system} on {machine or 'an unknown machine'}"
    flags = cpu_flags()
    missing = [flag for flag in REQUIRED_FLAGS if flag not in flags]
    if flags and missing:
        return f"the engine needs a CPU with {', '.join(REQUIRED_FLAGS)}; {cpu_name()} lacks {', '.join(missing)}"
    return None
