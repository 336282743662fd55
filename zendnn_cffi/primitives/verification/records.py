"""What is known of this library on this CPU: results of `make verify-library`, and of checks made on this machine."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from zendnn_cffi.engine import host
from zendnn_cffi.engine.folders import cache_folder
from zendnn_cffi.engine.library import PACKAGE, load
from zendnn_cffi.log import get_logger

log = get_logger(__name__)

VERIFIED = PACKAGE / "verified"
_REACHES_BEYOND = ("ends the process", "writes ")
FORMAT = 1  # part of the file names: raise it when kinds or checks change their meaning


def machine() -> str:
    """Return what results depend on: library version, CPU generation and the instruction set the library uses."""
    return f"{load().version}-{host.cpu_generation()}-{instruction_set()}"


def instruction_set() -> str:
    """Return the effective instruction set, such as "avx512_core_bf16"."""
    library = load()
    name = library.ffi.string(library.fn("cpu_isa2str")(library.fn("get_effective_cpu_isa")()))
    return str(name.decode()).removeprefix("cpu_isa_")


def path_of(name: str) -> Path:
    """Return the file of a machine's results."""
    return VERIFIED / f"{name}-{FORMAT}.txt.gz"


class Verified:
    """Results of `make verify-library` of one machine: a compressed text of three sorts of lines.

    {"machine": ..., "cpu": ..., "kinds": ...}                      the first line
    inner_product zendnn<tab>{operands: {the rest: what is wrong, or ""}}    one line per implementation
    """

    def __init__(self, text: str) -> None:
        head, *lines = text.splitlines()
        self.about: dict[str, Any] = json.loads(head)
        self._lines = dict(line.split("\t", 1) for line in lines)
        self._parsed: dict[str, dict[str, dict[str, str]]] = {}

    def get(self, kind: str) -> str | None:
        """Return what is wrong with a kind, "" where it is right, None where it was not run."""
        head, operands, *rest = kind.split(" | ", 2)
        return self._of(head).get(operands, {}).get(rest[0] if rest else "")

    def _of(self, head: str) -> dict[str, dict[str, str]]:
        if head not in self._parsed:  # most processes use few implementations
            self._parsed[head] = json.loads(self._lines.get(head, "{}"))
        return self._parsed[head]

    def kinds(self) -> dict[str, str]:
        """Return everything: kind -> what is wrong, "" where it is right."""
        return {
            " | ".join(part for part in (head, operands, rest) if part): problem
            for head in self._lines
            for operands, group in self._of(head).items()
            for rest, problem in group.items()
        }


@lru_cache(maxsize=16)
def verified(name: str) -> Verified:
    """Return what `make verify-library` found; nothing if it never ran."""
    try:
        return Verified(gzip.decompress(path_of(name).read_bytes()).decode())
    except (OSError, EOFError, zlib.error, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("%s cannot be read: %s", path_of(name), error)
        return Verified("{}")


def save(name: str, found: dict[str, str], **about: str) -> Path:
    """Write results, kind -> what is wrong, for `verified`; the same bytes for the same results."""
    tree: dict[str, dict[str, dict[str, str]]] = {}
    for kind, problem in sorted(found.items()):
        head, operands, *rest = kind.split(" | ", 2)
        tree.setdefault(head, {}).setdefault(operands, {})[rest[0] if rest else ""] = problem
    head = json.dumps({"machine": name, **about, "kinds": len(found)})
    lines = [f"{name}\t{json.dumps(group)}" for name, group in tree.items()]
    path = path_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("\n".join([head, *lines]).encode(), mtime=0))
    verified.cache_clear()
    _others.cache_clear()
    return path


class Checked:
    """Verdicts of checks on this machine, one line each in a file of the cache folder; never raises for it."""

    def __init__(self, folder: Path | None, engine: str) -> None:
        digest = hashlib.sha256(engine.encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"checked-{FORMAT}-{digest}.txt"
        self._problems: dict[str, str] = {}
        try:
            text = self.path.read_text(encoding="utf-8") if self.path else ""
        except (OSError, ValueError) as error:
            if not isinstance(error, FileNotFoundError):
                log.info("checks made before are not read: %s", error)
            return
        for line in text.split("\n")[:-1]:  # the last one may be half written
            kind, tab, problem = line.partition("\t")
            if tab and "\t" not in problem:  # else one that a full disk cut off, and another behind it
                self._problems[kind] = problem

    def get(self, kind: str) -> str | None:
        """Return what is wrong, "" where it is right, None where it is not known."""
        return self._problems.get(kind)

    def put(self, kind: str, problem: str, *, keep: bool = True) -> None:
        """Remember, in the file, too, if ``keep``."""
        self._problems[kind] = problem = " ".join(problem.split())
        if not keep or self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, f"{kind}\t{problem}\n".encode())  # whole lines, whoever else writes
            finally:
                os.close(file)
        except OSError as error:
            log.info("checks are not kept: %s", error)


@lru_cache(maxsize=4)
def checked(name: str, folder: Path | None) -> Checked:
    library = load()
    return Checked(folder, f"{name}; {host.cpu_name()}; {library.config.get('sha256', library.path)}")


def found(kind: str) -> str | None:
    """Return what `make verify-library` says of a kind: what is wrong, "" where it is right, None if not covered.

    What reached beyond its memory on another CPU with this library counts here, too: a check may not see it.
    """
    known = verified(machine_name()).get(kind)
    if known is not None:
        return known
    reached = (verified(name).get(kind) or "" for name in _others(machine_name()))
    return next((problem for problem in reached if problem.startswith(_REACHES_BEYOND)), None)


@lru_cache(maxsize=4)
def _others(name: str) -> list[str]:
    """Return the other machines with results for the same library version."""
    ending = path_of("").name
    names = (path.name.removesuffix(ending) for path in sorted(VERIFIED.glob(f"{name.partition('-')[0]}-*{ending}")))
    return [other for other in names if other != name]


@lru_cache(maxsize=1)
def machine_name() -> str:
    """Return `machine()`, which does not change."""
    return machine()


def here() -> Checked:
    """Return the checks made on this machine."""
    return checked(machine_name(), cache_folder())
