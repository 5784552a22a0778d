"""What a compiler does to a kernel or a model, made visible, and a small compiler that really runs.

`stages/` shows every stage of a Triton kernel; `backend/` is Triton's way to this machine's CPU; `passes/` is
`torch.compile(model, backend="cumulo")`; `onnx/` exports. Called by `cumulo compile`.
"""
