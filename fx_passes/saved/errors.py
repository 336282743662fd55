"""What saving and loading raise."""

from __future__ import annotations

from zendnn_cffi.errors import ZenDNNError

__all__ = ["FileError", "NotSaved"]


class NotSaved(ValueError):
    """A module holds something that a file cannot: the text says what, and what to do."""


class FileError(ZenDNNError, ValueError):
    """A file is damaged, cut off, of another kind or of a newer version: the text says which."""
