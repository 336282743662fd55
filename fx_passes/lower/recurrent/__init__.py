"""Recurrent networks: stacks taken apart into layers, and the primitives that compute a layer."""
