"""Which part of the graph runs on the library."""

from fx_passes.partition.partition import Constants, partition

__all__ = ["Constants", "partition"]
