"""`python -m zendnn_cffi`: what is installed, whether it works, how fast a model is, and what became of it."""
