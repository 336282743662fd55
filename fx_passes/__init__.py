"""The compiler: torch.fx graphs in, torch.fx graphs out. Knows graphs, never touches a C pointer (docs/passes.md)."""
