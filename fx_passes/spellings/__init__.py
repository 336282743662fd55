"""Which function, method, module or overload is which operation of the vocabulary; a file for each family."""

from fx_passes.spellings import (
    convolution,
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
