"""Optimized modules in files: weights and packed weights in safetensors, graphs and decisions as JSON beside them."""
