"""The library's objects: descriptors, memories, attributes, primitives, each handle with its owner."""
