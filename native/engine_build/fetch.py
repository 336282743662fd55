"""Fetch one pinned file from the Python package registry through pip, so that its indexes, proxies and cache apply."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path

from .common import BuildError, python_module, require_sha256, run, say
from .pins import LIEF_REQUIREMENT, RegistryFile

_NETWORK_MARKS = (
    "temporary failure in name resolution",
    "name or service not known",
    "connection broken",
    "failed to establish a new connection",
    "connection refused",
    "network is unreachable",
    "read timed out",
    "max retries exceeded",
    "from versions: none",
    "no matching distribution",
)


def fetch(pin: RegistryFile, into: Path) -> Path:
    """Return the path of the pinned file inside the folder `into`, downloading it if it is not there yet.

    A wheel is asked for by its own tags, so any Python 3.10+ on any machine gets the same file.
    Raises   BuildError if pip is missing, the registry cannot be reached, or the hash differs.
    """
    for present in _candidates(pin, into):
        require_sha256(present, pin.sha256, present.name)
        return present
    _require_pip()
    into.mkdir(parents=True, exist_ok=True)
    requirements = into / f"{pin.name}.requirements.txt"
    requirements.write_text(pin.requirement + "\n")
    log = into / f"{pin.name}.pip.log"
    say(f"fetching {pin.name} {pin.version} through pip")
    try:
        run(_pip_download(pin, requirements, into), log=log, failure=f"pip could not fetch {pin.name}=={pin.version}")
    except BuildError as error:
        raise BuildError(_explain(pin, log, str(error))) from None
    found = _candidates(pin, into)
    if len(found) != 1:
        raise BuildError(
            f"pip left {len(found)} files of {pin.name}=={pin.version} in {into}, expected one; see {log}."
        )
    require_sha256(found[0], pin.sha256, found[0].name)
    return found[0]


def _candidates(pin: RegistryFile, into: Path) -> list[Path]:
    """Files in the folder that could be the pinned one, by name."""
    suffix = ".whl" if pin.is_wheel else ".tar.gz"
    return sorted(into.glob(f"{pin.name}-{pin.version}*{suffix}"))


def _pip_download(pin: RegistryFile, requirements: Path, into: Path) -> list[str | Path]:
    """The pip command for one pinned file."""
    command = python_module("pip", "download", "--no-deps", "--require-hashes", "--disable-pip-version-check")
    command += ["--progress-bar", "off", "-r", requirements, "-d", into]
    if pin.is_wheel:
        assert pin.platform and pin.python and pin.abi
        command += ["--only-binary", ":all:", "--platform", pin.platform]
        command += ["--python-version", pin.python, "--implementation", "cp", "--abi", pin.abi]
    else:
        # Named, not ":all:": pip asks the sdist for its metadata, and what that needs should come as wheels.
        command += ["--no-binary", pin.name]
    return command


def _explain(pin: RegistryFile, log: Path, error: str) -> str:
    """Turn pip's failure into one line that says what to do."""
    output = log.read_text(errors="replace").lower() if log.exists() else ""
    if "do not match the hashes" in output:
        return f"{pin.name}=={pin.version} as downloaded does not have the pinned hash; refusing it. See {log}."
    if any(mark in output for mark in _NETWORK_MARKS):
        other = "-DZENDNN_CFFI_WHEEL=<file>" if pin.is_wheel else "-DZENDNN_CFFI_BLIS_SDIST=<file>"
        return (
            f"{pin.name}=={pin.version} cannot be downloaded: package registry not reachable, or not offering it. "
            f"Check the network or pip's index settings, or give a downloaded file with {other}. See {log}."
        )
    return error


def _require_pip() -> None:
    if importlib.util.find_spec("pip") is None:
        raise BuildError(f"pip is needed to download the engine: run '{sys.executable} -m ensurepip' and build again.")


def ensure_lief(work: Path) -> None:
    """Make `import lief` work: as it is, or by installing it into `work` (never into the user's environment)."""
    if importlib.util.find_spec("lief") is not None:
        return
    target = work / "lief"
    if not (target / "lief").is_dir():
        _require_pip()
        say(f"installing {LIEF_REQUIREMENT} into the build folder")
        partial = work / "lief.part"
        shutil.rmtree(partial, ignore_errors=True)
        command = python_module("pip", "install", "--disable-pip-version-check", "--target", partial, LIEF_REQUIREMENT)
        failure = f"LIEF is needed to adapt the library: pip install '{LIEF_REQUIREMENT}'"
        run(command, log=work / "lief.pip.log", failure=failure)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()
