"""Random normalizations with their results in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from tests.zendnn_cffi.functional.fuzzing.cases import Case, d, largest, spatial_sizes
from tests.zendnn_cffi.functional.fuzzing.holding import Holder, as_tensor
from zendnn_cffi import functional as zf


def batch_norm(h: Holder) -> Case:
    x = h.operand([h.size(), h.size(), *spatial_sizes(h)[1]] if h.chance(0.8) else [h.size(), h.size()])
    c = as_tensor(x).shape[1]
    mean, variance = h.operand([c], torch.float32), h.operand([c], torch.float32, positive=True)
    weight, bias = (h.operand([c], torch.float32) if h.chance(0.5) else None for _ in range(2))
    kwargs: dict[str, Any] = {"eps": h.r.choice([1e-5, 0.1])}
    base = F.batch_norm(d(x), d(mean), d(variance), *(None if v is None else d(v) for v in (weight, bias)), **kwargs)
    if h.chance(0.3):
        kwargs["relu"], base = True, base.relu()
    scale = largest(base) + 20.0
    return Case(zf.batch_norm, [x, mean, variance, weight, bias], kwargs, base, scale=scale, in_place=x)


def layer_norm(h: Holder) -> Case:
    x = h.operand(h.sizes(1, 4))
    last = list(as_tensor(x).shape)[-h.r.randint(1, d(x).dim()) :]
    weight, bias = (h.operand(last, torch.float32) if h.chance(0.5) else None for _ in range(2))
    eps = h.r.choice([1e-5, 0.1])
    base = F.layer_norm(d(x), last, *(None if v is None else d(v) for v in (weight, bias)), eps)
    shape: Any = last[0] if len(last) == 1 and h.chance(0.5) else last
    scale = 50.0 if math.prod(last) <= 4 else 5.0  # few numbers, nearly equal ones among them
    return Case(zf.layer_norm, [x, shape, weight, bias], {"eps": eps}, base, out=False, scale=scale)


def lrn(h: Holder) -> Case:
    x = h.operand([h.size(), h.size(), *spatial_sizes(h)[1]])
    size, k = h.r.choice([1, 3, 5]), h.r.choice([1.0, 2.0])
    alpha, beta = h.r.choice([1e-4, 0.5]), h.r.choice([0.75, 0.5])
    base = F.local_response_norm(d(x).contiguous(), size, alpha, beta, k)
    return Case(zf.lrn, [x, size], {"alpha": alpha, "beta": beta, "k": k}, base)


NORMS = (batch_norm, layer_norm, lrn)
