"""The post-op chain of AOCL-BLIS: from tuples to its C structs, every length and type checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zendnn_cffi.errors import UnsupportedError
from zendnn_cffi.functional._arrays import as_input
from zendnn_cffi.primitives import allocation, checks
from zendnn_cffi.primitives.lpgemm import (
    ALGORITHMS,
    BIAS,
    ELTWISE,
    KINDS,
    MATRIX_ADD,
    MATRIX_MUL,
    MAX_POST_OPS,
    SCALE,
    STORAGE,
)

_INT8 = (torch.int8, torch.uint8)


class GemmPostOps:
    """A chain for one gemm of an [m, n] result; ``tensors`` are the operands, by name, that must stay alive and apart
    from the result.
    """

    def __init__(self, m: int, n: int, src: torch.dtype, result: torch.dtype) -> None:
        self.m, self.n, self.src, self.result = m, n, src, result
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._sequence: list[int] = []
        self._entries: dict[str, list[dict[str, Any]]] = {
            "sum": [],
            "eltwise": [],
            "bias": [],
            "matrix_add": [],
            "matrix_mul": [],
        }

    def extend(self, post_ops: Any) -> None:
        """Append post-ops given as tuples."""
        if isinstance(post_ops, (str, bytes)) or not isinstance(post_ops, (list, tuple)):
            raise TypeError(f"post_ops must be a sequence of tuples such as ('eltwise', 'relu'), got {post_ops!r}")
        for position, entry in enumerate(post_ops):
            name = f"post_ops[{position}]"
            match entry:
                case ("eltwise", str() as kind, *numbers) if len(numbers) <= 2:
                    self._eltwise(kind, [checks.as_float(v, f"a number of {name}") for v in numbers], name)
                case ("binary", str() as kind, other):
                    self._matrix(kind, other, name)
                case ("bias", other):
                    self.bias(other, f"the tensor of {name}")
                case ("scale", scale, *zero) if len(zero) <= 1:
                    self._scale(scale, zero[0] if zero else 0, name)
                case _:
                    raise ValueError(
                        f"{name} is {entry!r}: it must be ('eltwise', kind[, alpha, beta]), ('binary', 'add' or "
                        "'mul', tensor), "
                        "('bias', tensor) or ('scale', scales[, zero_points])"
                    )
        if len(self._sequence) > MAX_POST_OPS:
            raise ValueError(f"gemm takes at most {MAX_POST_OPS} post-ops, bias included, got {len(self._sequence)}")

    def _keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors.append((name, tensor))
        return tensor

    def bias(self, value: Any, name: str) -> None:
        """Append x + value, one value per column."""
        allowed = (torch.float32, torch.int32) if self.src in _INT8 else (torch.float32, torch.bfloat16)
        tensor = as_input(value, name, allowed)
        if tuple(tensor.shape) != (self.n,):
            raise ValueError(f"{name} must have shape [{self.n}], one value per column, got {list(tensor.shape)}")
        tensor = self._keep(name, tensor.contiguous())
        if self.n == 1 and self.src in _INT8 and tensor.dtype == torch.float32:
            # one column of an 8-bit product gets another row's bias: add it as a matrix
            self._append_matrix(MATRIX_ADD, "matrix_add", self._keep(name, tensor.expand(self.m, 1).contiguous()))
            return
        self._sequence.append(BIAS)
        self._entries["bias"].append({"bias": tensor, "stor_type": STORAGE[tensor.dtype]})

    def _eltwise(self, kind: str, numbers: Sequence[float], name: str) -> None:
        alpha, beta = (*numbers, 0.0, 0.0)[:2]
        if kind == "relu" and alpha:
            kind = "prelu"
            if alpha < 0:
                raise UnsupportedError(
                    f"{name}: AOCL-BLIS negates positive numbers where a relu has a negative slope ({alpha}): apply it "
                    "to the result"
                )
        elif kind == "prelu" or kind not in ALGORITHMS:
            raise ValueError(
                f"the kind of {name} must be one of {', '.join(k for k in ALGORITHMS if k != 'prelu')}; got {kind!r}"
            )
        if kind in ("clip", "prelu") and self.result in (*_INT8, torch.int32):
            raise ValueError(
                f"{name}: clip and a sloped relu go with float results only (the library misreads their parameters "
                "for integer ones)"
            )
        if kind == "swish" and not numbers:
            raise ValueError(f"{name} needs swish's alpha: ('eltwise', 'swish', 1.0) is silu")
        if kind == "clip" and len(numbers) < 2:
            raise ValueError(f"{name} needs clip's bounds: ('eltwise', 'clip', low, high)")
        values = [self._keep(name, allocation.numbers([v], torch.float32)) for v in (alpha, beta)]
        self._sequence.append(ELTWISE)
        self._entries["eltwise"].append({"algo": ALGORITHMS[kind], "alpha": values[0], "beta": values[1]})

    def _matrix(self, kind: str, other: Any, name: str) -> None:
        if kind not in ("add", "mul"):
            raise ValueError(f"the kind of {name} must be 'add' or 'mul', got {kind!r}")
        allowed = (torch.float32,) if self.src == torch.float32 else (torch.float32, torch.bfloat16)
        tensor = as_input(other, f"the tensor of {name}", allowed)
        if tuple(tensor.shape) != (self.m, self.n):
            raise ValueError(
                f"the tensor of {name} must have the result's shape [{self.m}, {self.n}], got {list(tensor.shape)}"
            )
        if (tensor.stride(1) != 1 and self.n > 1) or (self.m > 1 and tensor.stride(0) < self.n):
            tensor = tensor.contiguous()
        self._keep(f"the tensor of {name}", tensor)
        self._append_matrix(MATRIX_ADD if kind == "add" else MATRIX_MUL, "matrix_" + kind, tensor)

    def _append_matrix(self, number: int, kind: str, tensor: torch.Tensor) -> None:
        one = self._keep(kind, allocation.numbers([1.0], torch.float32))
        self._sequence.append(number)
        self._entries[kind].append(
            {
                "matrix": tensor,
                "scale_factor": one,
                "scale_factor_len": 1,
                "ldm": tensor.stride(0) if self.m > 1 else self.n,
                "stor_type": STORAGE[tensor.dtype],
            }
        )

    def _scale(self, scale: Any, zero: Any, name: str) -> None:
        if self.result == torch.int32:
            raise ValueError(f"{name}: an int32 result holds the plain sums; scale them into another out_dtype")
        scales = self._numbers(scale, f"the scales of {name}", torch.float32)
        kind = self.result if self.result in _INT8 else torch.float32
        zeros = self._numbers(zero, f"the zero points of {name}", kind)
        shift = None
        if self.src == torch.bfloat16 and bool(zeros.any()):  # its kernels misread f32 zero points: add them as a bias
            shift, zeros = zeros, self._keep(name, allocation.numbers([0.0], torch.float32))
        self._sequence.append(SCALE)
        self._entries["sum"].append(
            {
                "scale_factor": scales,
                "zero_point": zeros,
                "scale_factor_len": scales.numel(),
                "zero_point_len": zeros.numel(),
                "zp_stor_type": STORAGE[kind],
                "sf_stor_type": 0,
            }
        )
        if shift is not None:
            self.bias(shift.expand(self.n), f"the zero points of {name}")

    def _numbers(self, value: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one number, or one per column, in dtype."""
        if checks.is_number(value):
            value = allocation.numbers([checks.as_float(value, name)], torch.float64)
        tensor = as_input(value, name, None).reshape(-1)
        if tensor.numel() not in (1, self.n):
            raise ValueError(f"{name} must be one number or {self.n}, one per column, got {tensor.numel()}")
        if dtype in _INT8 and tensor.numel():
            low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            if bool((tensor != tensor.double().round()).any()) or tensor.min() < low or tensor.max() > high:
                raise ValueError(f"{name} must be whole numbers from {low} to {high}, the range of the result")
        return self._keep(name, tensor.to(dtype).contiguous())

    def bound(self, largest: float) -> float:
        """Return what no |result| exceeds before it is rounded, where no |sum| before post-ops exceeds ``largest``."""
        rows = {kind: iter(entries) for kind, entries in self._entries.items()}
        for number in self._sequence:
            row = next(rows[KINDS[number]])
            if number == ELTWISE:
                largest = max(largest, 1.0, *(abs(float(row[k])) for k in ("alpha", "beta")))
            elif number == SCALE:
                largest = largest * _largest(row["scale_factor"]) + _largest(row["zero_point"])
            elif number == BIAS:
                largest += _largest(row["bias"])
            else:
                size = _largest(row["matrix"])
                largest = largest + size if number == MATRIX_ADD else largest * size
        return largest

    def for_result(self, dtype: torch.dtype) -> GemmPostOps:
        """Return the same chain for a float32 result, whose zero points are float32."""
        chain = GemmPostOps(self.m, self.n, self.src, dtype)
        chain._sequence, chain._entries, chain.tensors = self._sequence, dict(self._entries), list(self.tensors)
        chain._entries["sum"] = [
            {
                **row,
                "zero_point": chain._keep("zero points", row["zero_point"].to(torch.float32)),
                "zp_stor_type": STORAGE[torch.float32],
            }
            for row in self._entries["sum"]
        ]
        return chain

    def build(self, ffi: Any) -> Any:
        """Return the C struct (NULL for an empty chain), which keeps what it points to alive."""
        if not self._sequence:
            return ffi.NULL
        post_op = ffi.new("aocl_post_op *")
        keep: list[Any] = [post_op, ffi.new("AOCL_POST_OP_TYPE[]", self._sequence)]
        post_op.seq_vector, post_op.seq_length = keep[1], len(self._sequence)
        post_op.num_eltwise = len(self._entries["eltwise"])
        for kind, rows in self._entries.items():
            if not rows:
                continue
            array = ffi.new(f"aocl_post_op_{kind}[]", len(rows))
            for struct, row in zip(array, rows, strict=False):
                target = struct
                if kind == "eltwise":
                    target = struct.algo
                    target.algo_type = row["algo"]
                for field, value in row.items():
                    if isinstance(value, torch.Tensor):
                        setattr(target, field, ffi.cast("void *", value.data_ptr()))
                    elif field != "algo":
                        setattr(target, field, value)
            setattr(post_op, kind, array)
            keep.append(array)
        self._keep_alive = keep
        return post_op


def _largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; infinite for NaN, too."""
    size = float(tensor.float().abs().max())
    return size if size == size else float("inf")
