"""Shared by every step: the error type, running commands, hashing, and writing files whole or not at all."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


class BuildError(Exception):
    """A step cannot go on. The message is one line saying what is wrong and what to do."""


def say(message: str) -> None:
    """Print one progress line; CMake and pip pass it on."""
    print(f"zendnn_cffi: {message}", flush=True)


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file as lower-case hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def require_sha256(path: Path, expected: str, what: str) -> None:
    """Raise BuildError unless the file's sha256 is the expected one."""
    found = sha256_of(path)
    if found != expected:
        raise BuildError(
            f"{what} is not the pinned file: sha256 {found}, expected {expected}. "
            "Delete it and build again, or choose another provider with -DZENDNN_PROVIDER=system or source."
        )


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`; it becomes `target` only if the block ends without an exception."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def run(
    command: Sequence[str | Path],
    *,
    log: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    failure: str,
) -> str:
    """Run a command with its output in `log`, and return that output.

    Raises   BuildError(failure + where the log is + the line that looks most like the reason).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **(env or {})}
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise BuildError(f"{failure} ({words[0]} could not be started: {error.strerror})") from None
    log.write_text(f"$ {' '.join(words)}\n{done.stdout}")
    if done.returncode != 0:
        reason = telling_line(done.stdout)
        raise BuildError(f"{failure} ({reason or f'exit status {done.returncode}'}; full output: {log})")
    return done.stdout


def telling_line(output: str) -> str:
    """Return the line of a failed command's output that most likely says why: the first error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    marks = ("error:", "fatal:", "error ")
    for line in lines:
        lower = line.lower()
        if any(mark in lower for mark in marks) and "from versions: none" not in lower:
            return line[:200]
    return lines[-1][:200] if lines else ""


def python_module(name: str, *arguments: str | Path) -> list[str | Path]:
    """Return the command that runs a module with the interpreter of this build."""
    return [sys.executable, "-m", name, *arguments]
