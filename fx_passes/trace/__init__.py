"""From a module to a graph: torch.fx, torch.export, and what TorchDynamo captured."""
