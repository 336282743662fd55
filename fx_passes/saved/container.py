"""The file: safetensors, with a document of ours in its metadata.

    8 bytes     length of the header
    header      JSON: {"__metadata__": {"zendnn_cffi": document, ...}, name: {dtype, shape, data_offsets}, ...}
    data        packed weights from a page's boundary on, each on a cache line; then parameters under their own names

Any reader of safetensors finds the parameters in it. The data is mapped, not read: processes share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fx_passes.saved.errors import FileError, NotSaved
from zendnn_cffi.engine.openmp import single_threaded
from zendnn_cffi.runtime.mapped import let_go

KEY = "zendnn_cffi"
PACKED = "zendnn_cffi.packed."  # what names of packed weights begin with
_PAGE, _LINE = 4096, 64
_BLOCK_BYTES = 1 << 16  # summed up at once
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write(path: Path, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the file in one step: nobody finds half of it, also where this process is ended meanwhile.

    document  JSON
    tensors   dense, row-major; in this order, so that those which must be aligned come first
    Raises    NotSaved for a dtype that safetensors lacks, OSError
    """
    table, offset = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise NotSaved(f"{name} is of {tensor.dtype}, which safetensors files do not hold")
        end = offset + tensor.nbytes
        table[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    sums = {name: checksum(tensor) for name, tensor in tensors.items()}
    text = json.dumps({**document, "sums": sums, "table": table})
    metadata = {"format": "pt", KEY: text, f"{KEY}.sha256": _digest(text)}
    header = json.dumps({"__metadata__": metadata, **table}).encode()
    header += b" " * (-(len(header) + 8) % _PAGE)
    with _replacing(path) as partial, partial.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in tensors.values():
            file.write(memoryview(_bytes_of(tensor).numpy()))
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path beside this one, which takes its place in the end."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def read(path: Path, verify: bool = True) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the document and the tensors, mapped into memory. Writes to these stay this process's own.

    verify  whether all data is compared with its sums
    Raises  FileNotFoundError; FileError for a file that is damaged, cut off or of another kind
    """
    from safetensors import SafetensorError, safe_open

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
    document = json.loads(text)
    table = {name: [_DTYPES.get(t.dtype), list(t.shape)] for name, t in tensors.items()}
    if table != {name: [row["dtype"], row["shape"]] for name, row in document["table"].items()}:
        raise FileError(f"{str(path)!r} is damaged: its tensors are not those that were written")
    if verify:
        with single_threaded():  # memory bounds it, and several processes start at once
            for name, expected in document["sums"].items():
                if checksum(tensors[name]) != expected:
                    raise FileError(f"{str(path)!r} is damaged: {name} is not what was written")
                if not name.startswith(PACKED):  # most parameters are not looked at again
                    let_go(tensors[name])
    return document, tensors


def padded(packed: torch.Tensor) -> torch.Tensor:
    """Bytes, filled up to whole cache lines."""
    return torch.nn.functional.pad(packed, (0, -packed.numel() % _LINE)) if packed.numel() % _LINE else packed


def by_alignment(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in an order that leaves large ones on cache lines and each on a multiple of its element's size."""

    def rank(item: tuple[str, torch.Tensor]) -> tuple[bool, int]:
        return item[1].nbytes % _LINE != 0, -item[1].element_size()

    return dict(sorted(tensors.items(), key=rank))


def checksum(tensor: torch.Tensor) -> str:
    """A digest of a dense tensor's bytes: of the sums of its 8-byte words, block by block. Memory bounds its speed."""
    flat = _bytes_of(tensor)
    whole = flat.numel() - flat.numel() % _BLOCK_BYTES
    digest = hashlib.sha256(flat[whole:].numpy().tobytes())
    if whole:
        words = flat[:whole].view(torch.int64).view(-1, _BLOCK_BYTES // 8)
        digest.update(words.sum(1).numpy().tobytes())
    return digest.hexdigest()[:16]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
