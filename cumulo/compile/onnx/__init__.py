"""Decoders as ONNX files: exported, checked against torch, and taken apart: shapes, FLOPs, memory, fusion."""
