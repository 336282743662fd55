"""Every operation -> the candidates that may compute it, a rule each."""
