"""The module that stands for a region: lowered once per input signature, run as a program."""
