"""Rules of convolutions, pooling and resampling."""
