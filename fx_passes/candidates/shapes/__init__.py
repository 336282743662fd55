"""Shapes, dtypes and strides of results from those of operands, where they are clear without running anything."""
