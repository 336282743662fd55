"""Provider `prebuilt`: AMD's own binary of ZenDNN 5.1 and AOCL-BLIS, out of the zentorch wheel. Needs no compiler."""

from __future__ import annotations

import platform
import zipfile
from pathlib import Path

from .common import BuildError, require_sha256, say, written_whole
from .config import EngineConfig, copy_licences
from .fetch import ensure_lief, fetch
from .pins import ZENTORCH_LIBRARY, ZENTORCH_LIBRARY_SHA256, ZENTORCH_WHEEL, ZENTORCH_ZENDNN_VERSION
from .standalone import SONAME, make_standalone

# States that the library was changed (Apache-2.0, section 4b) and carries the notices of what AMD linked into it.
NOTICE = Path(__file__).resolve().parent.parent / "notices" / "prebuilt.txt"
OLDEST_GLIBC = (2, 28)


def unsupported_reason() -> str | None:
    """Return why the wheel's library cannot run on this Linux, None if it can: it is built for glibc 2.28 or newer."""
    name, version = platform.libc_ver()
    if name != "glibc":
        return "AMD's binary of ZenDNN needs glibc, which this system's Python does not use"
    found = tuple(int(part) for part in version.split(".")[:2])
    return None if found >= OLDEST_GLIBC else f"AMD's binary of ZenDNN needs glibc 2.28 or newer, this is {version}"


def build_prebuilt(out: Path, work: Path, wheel: Path | None) -> EngineConfig:
    """Put libamdZenDNN.so and AMD's licences into `out`; `wheel` is a file already downloaded, or None.

    Where the library cannot run, the result is an engine-less configuration with the reason.
    """
    reason = unsupported_reason()
    if reason is not None:
        return EngineConfig(provider="none", reason=reason)
    if wheel is None:
        wheel = fetch(ZENTORCH_WHEEL, work / "download")
    elif not wheel.is_file():
        raise BuildError(f"ZENDNN_CFFI_WHEEL={wheel} is not a file.")
    else:
        require_sha256(wheel, ZENTORCH_WHEEL.sha256, str(wheel))
    ensure_lief(work)
    import lief

    lief_version = str(getattr(lief, "__version__", "of unknown version"))

    library = unpack_library(wheel, work)
    say(f"making {SONAME} stand alone (LIEF {lief_version})")
    make_standalone(library, out / SONAME)
    copy_licences(out, {**wheel_licences(wheel), "NOTICE": NOTICE})
    return EngineConfig(
        provider="prebuilt",
        zendnn_version=ZENTORCH_ZENDNN_VERSION,
        library=SONAME,
        blis=SONAME,
        source_sha256=ZENTORCH_LIBRARY_SHA256,
        options={"wheel": f"{ZENTORCH_WHEEL.name}=={ZENTORCH_WHEEL.version}", "wheel_sha256": ZENTORCH_WHEEL.sha256},
        built_with={"lief": lief_version},
    )


def unpack_library(wheel: Path, work: Path) -> Path:
    """Extract the one library of the wheel into `work` and check its hash."""
    target = work / Path(ZENTORCH_LIBRARY).name
    with zipfile.ZipFile(wheel) as archive, written_whole(target) as temporary:
        try:
            temporary.write_bytes(archive.read(ZENTORCH_LIBRARY))
        except KeyError:
            raise BuildError(f"{wheel.name} has no {ZENTORCH_LIBRARY}: not the wheel this build knows.") from None
        require_sha256(temporary, ZENTORCH_LIBRARY_SHA256, f"{ZENTORCH_LIBRARY} in {wheel.name}")
    return target


def wheel_licences(wheel: Path) -> dict[str, Path | bytes]:
    """Return the licence and notice files of the wheel's metadata, as {name to install under: text}."""
    words = ("licen", "notice", "third", "copying")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" in name and not name.endswith("/")]
        chosen = [name for name in names if any(word in Path(name).name.lower() for word in words)]
        if not chosen:
            raise BuildError(f"{wheel.name} carries no licence text; refusing to redistribute its library.")
        return {f"zentorch-{Path(name).name}": archive.read(name) for name in chosen}
