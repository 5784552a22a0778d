"""`torch.compile(model, backend="cumulo")`: passes over an FX graph, each with the reason for what it did."""
