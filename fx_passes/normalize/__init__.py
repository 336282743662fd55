"""One spelling per operation."""

from fx_passes.normalize.normalize import normalize

__all__ = ["normalize"]
