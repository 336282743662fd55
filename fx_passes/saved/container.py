"""The file: safetensors, with a document of ours in its metadata.

    8 bytes     length of the header
    header      JSON: {"__metadata__": {"zendnn_cffi": document, ...}, name: {dtype, shape, data_offsets}, ...}
    data        packed weights from a page's boundary on, each on a cache line; then parameters under their own names

Any reader of safetensors finds the parameters in it. The data is mapped, not read: processes share it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fx_passes.saved.errors import FileError, NotSaved
from fx_passes.trace.held import bytes_of
from zendnn_cffi.engine.openmp import single_threaded
from zendnn_cffi.runtime.mapped import let_go

KEY = "zendnn_cffi"
PACKED = "zendnn_cffi.packed."  # what names of packed weights begin with
_PAGE, _LINE = 4096, 64
_BLOCK_BYTES, _LITTLE_BLOCK_BYTES = 1 << 16, 1 << 10  # summed up at once
# Those of every version of safetensors that is taken, and those that the installed one has beside them.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@functools.cache
def _dtypes() -> dict[torch.dtype, str]:
    from safetensors import torch as of_torch

    return {dtype: name for name, dtype in getattr(of_torch, "_TYPES", {}).items()} | _DTYPES


def write(path: Path, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the file in one step: nobody finds half of it, also where this process is ended meanwhile.

    document  JSON
    tensors   dense, row-major; in this order, so that those which must be aligned come first
    Raises    NotSaved for a dtype that safetensors lacks, OSError
    """
    table, offset = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _dtypes():
            raise NotSaved(f"{name} is of {tensor.dtype}, which safetensors files do not hold")
        end = offset + tensor.nbytes
        table[name] = {"dtype": _dtypes()[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    sums = {name: checksum(tensor) for name, tensor in tensors.items()}
    text = json.dumps({**document, "sums": sums, "whole": checksum_of_all(tensors.values()), "table": table})
    metadata = {"format": "pt", KEY: text, f"{KEY}.sha256": _digest(text)}
    header = json.dumps({"__metadata__": metadata, **table}).encode()
    header += b" " * (-(len(header) + 8) % _PAGE)
    with _replacing(path) as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in tensors.values():
            if tensor.numel():
                file.write(bytes_of(tensor).data)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of this one in the end.

    It has no name until then, where the system can do so: who is ended meanwhile leaves nothing behind. A link goes on
    pointing there, and the permissions stay. Raises ValueError for what is no file: a device, a pipe, a folder.
    """
    path = path.resolve()
    before = path.stat() if path.exists() else None
    if before is not None and not stat.S_ISREG(before.st_mode):
        raise ValueError(f"{path} is no file that another one could take the place of: give a path of a file")
    # Threads, and containers in which processes have the same number, may write to one path; names may be long.
    partial = path.with_name(f".zendnn_cffi.{os.urandom(8).hex()}.partial")
    nameless = _nameless(path.parent)
    try:
        with nameless or partial.open("xb") as file:
            yield file
            file.flush()
            if before is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            os.fsync(file.fileno())
            if nameless is not None:
                opened = file.fileno()  # as a folder it counts for nothing, and makes os.link follow the link
                os.link(f"/proc/self/fd/{opened}", partial, src_dir_fd=opened)
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _nameless(folder: Path) -> BinaryIO | None:
    """A new file without a name, None where the file system has no such."""
    if not hasattr(os, "O_TMPFILE") or not Path("/proc/self/fd").is_dir():
        return None
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666), "wb")
    except OSError:
        return None


def read(path: Path, verify: bool = True) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the document and the tensors, mapped into memory. Writes to these stay this process's own.

    verify  whether all data is compared with its sums
    Raises  FileNotFoundError; FileError for a file that is damaged, cut off or of another kind
    """
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        raise FileError(f"{str(path)!r} is a folder: give the path of the file that zendnn_cffi.save wrote")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except FileNotFoundError:
        raise FileNotFoundError(f"no file at {str(path)!r}: zendnn_cffi.save writes such files") from None
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, OverflowError, AttributeError) as error:
        raise FileError(f"{str(path)!r} is no whole safetensors file ({type(error).__name__}: {error})") from error
    text = metadata.get(KEY)
    if text is None:
        raise FileError(f"{str(path)!r} was not written by zendnn_cffi.save: it holds tensors alone")
    if metadata.get(f"{KEY}.sha256") != _digest(text):
        raise FileError(f"{str(path)!r} is damaged: its description is not the one that was written")
    table = {name: [_dtypes().get(t.dtype), list(t.shape)] for name, t in tensors.items()}
    try:
        document = json.loads(text)
        written = {name: [row["dtype"], row["shape"]] for name, row in document["table"].items()}
        is_whole = (
            table == written and document["sums"].keys() == table.keys() and _are_places(document["table"], tensors)
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FileError(f"{str(path)!r} is damaged: its description says nothing ({type(error).__name__})") from error
    if not is_whole:
        raise FileError(f"{str(path)!r} is damaged: its tensors are not those that were written")
    if verify:
        with single_threaded():  # memory bounds it, and several processes start at once
            whole = _side_by_side(tensors, document["table"]) if "whole" in document else None
            if whole is None or checksum(whole, _LITTLE_BLOCK_BYTES) != document["whole"]:
                for name, expected in document["sums"].items():
                    if checksum(tensors[name]) != expected:
                        raise FileError(f"{str(path)!r} is damaged: {name} is not what was written")
                if whole is not None:
                    raise FileError(f"{str(path)!r} is damaged: its data is not what was written")
        let_go([tensor for name, tensor in tensors.items() if not name.startswith(PACKED)])  # most are not read again
    return document, tensors


def _are_places(table: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether the tensors lie one behind the other where table says: addresses are computed from it."""
    reached = 0
    for (begin, end), name in sorted((row["data_offsets"], name) for name, row in table.items()):
        if type(begin) is not int or begin != reached or end - begin != tensors[name].nbytes:
            return False
        reached = end
    return True


def _side_by_side(tensors: Mapping[str, torch.Tensor], table: Mapping[str, Any]) -> torch.Tensor | None:
    """All data as it lies in memory, to be read at once: a call for each small tensor takes longer than its bytes."""
    places = [(tensors[name].data_ptr(), *row["data_offsets"]) for name, row in table.items() if tensors[name].nbytes]
    if not places:
        return None
    base, size_bytes = places[0][0] - places[0][1], max(end for _, _, end in places)
    if any(address != base + begin for address, begin, _ in places) or base % 8:
        return None
    return torch.frombuffer((ctypes.c_uint8 * size_bytes).from_address(base), dtype=torch.uint8)


def padded(packed: torch.Tensor) -> torch.Tensor:
    """Bytes, filled up to whole cache lines."""
    return torch.nn.functional.pad(packed, (0, -packed.numel() % _LINE)) if packed.numel() % _LINE else packed


def by_alignment(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in an order that leaves large ones on cache lines and each on a multiple of its element's size."""

    def rank(item: tuple[str, torch.Tensor]) -> tuple[bool, int]:
        return item[1].nbytes % _LINE != 0, -item[1].element_size()

    return dict(sorted(tensors.items(), key=rank))


def checksum(tensor: torch.Tensor, block_bytes: int = _BLOCK_BYTES) -> str:
    """A digest of a dense tensor's bytes: of the sums of its 8-byte words, block by block. Memory bounds its speed."""
    return _checksum([tensor], block_bytes)


def checksum_of_all(tensors: Iterable[torch.Tensor]) -> str:
    """checksum() of the tensors' bytes one after the other, in little blocks: pages in another order show."""
    return _checksum(tensors, _LITTLE_BLOCK_BYTES)


def _checksum(tensors: Iterable[torch.Tensor], block_bytes: int) -> str:
    sums, rest = [], torch.empty(0, dtype=torch.uint8, device="cpu")
    for tensor in tensors:
        flat = _bytes_of(tensor)
        missing = min(-rest.numel() % block_bytes, flat.numel())
        rest, flat = torch.cat([rest, flat[:missing]]), flat[missing:]
        if rest.numel() == block_bytes:
            sums.append(_sums(rest, block_bytes))
            rest = rest[:0]
        whole = flat.numel() - flat.numel() % block_bytes
        if whole:
            sums.append(_sums(flat[:whole], block_bytes))
        rest = torch.cat([rest, flat[whole:]])
    digest = hashlib.sha256(rest.numpy().tobytes())
    for each in sums:
        digest.update(each)
    return digest.hexdigest()[:16]


def _sums(flat: torch.Tensor, block_bytes: int) -> bytes:
    """The sums of words of whole blocks."""
    aligned = flat.clone() if flat.data_ptr() % 8 or flat.storage_offset() % 8 else flat
    sums: bytes = aligned.view(torch.int64).view(-1, block_bytes // 8).sum(1).numpy().tobytes()
    return sums


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
