"""Which function, method, module or overload is which operation of the vocabulary; a file for each family."""

from fx_passes.spellings import (
    convolution,
    created,
    elementwise,
    embedding,
    interpolation,
    movement,
    normalization,
    pooling,
    products,
    quantized,
    recurrent,
)

__all__ = [
    "convolution",
    "created",
    "elementwise",
    "embedding",
    "interpolation",
    "movement",
    "normalization",
    "pooling",
    "products",
    "quantized",
    "recurrent",
]
