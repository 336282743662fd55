"""Parts of quantize(): which layers compute in integers, and corrections that bring them nearer to the float model."""
