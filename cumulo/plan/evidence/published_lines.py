"""A line of `published_training.csv`: its columns, and what models of published tables are made of. The readers of
`published_tables` and `published_nemo` make lines with it.
"""

from collections.abc import Mapping

Line = dict[str, str]
Given = Mapping[str, str]

COLUMNS = [
    "id", "source", "software", "node", "fabric", "gpus", "model", "layers", "hidden", "heads", "kv_heads", "ffn",
    "gated", "vocabulary", "tied", "learned_positions", "sequence", "dp", "tp", "pp", "cp", "ep", "zero",
    "shard", "sequence_parallel", "schedule", "chunks_per_stage", "micro_batch", "global_batch", "recompute",
    "dtype", "gradient_dtype", "flash", "overlap_tensor", "expert_exchange", "overlap_expert", "predict_ahead",
    "reported", "unit",
]  # fmt: skip
GPT = {"gated": 0, "tied": 1, "learned_positions": 1}
LLAMA = {"gated": 1, "tied": 0, "learned_positions": 0}
NEMOTRON = {"gated": 0, "tied": 0, "learned_positions": 0}
HARDWARE, MODEL_FLOPS, FULL_MFU = (
    "tflops-hardware-full-recompute",
    "tflops-model",
    "mfu-percent-full-attention",
)
SECONDS, TOKENS = "step-seconds", "tokens-per-second-per-gpu"


def shape_of(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, kind: Mapping[str, int]
) -> dict[str, int]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, **kind}


# Tables that print a model's name only. NeMo's sizes follow from its printed TFLOP/s over tokens/s.
MODELS: dict[str, dict[str, int]] = {
    "GPT3-5B": {**shape_of(24, 4096, 32, 32, 16384, GPT), "vocabulary": 51200},
    "GPT3-20B": {**shape_of(44, 6144, 48, 48, 24576, GPT), "vocabulary": 51200},
    "GPT3-175B": {**shape_of(96, 12288, 96, 96, 49152, GPT), "vocabulary": 51200},
    "LLAMA2-7B": {**shape_of(32, 4096, 32, 32, 11008, LLAMA), "vocabulary": 32000},
    "LLAMA2-13B": {**shape_of(40, 5120, 40, 40, 13824, LLAMA), "vocabulary": 32000},
    "LLAMA2-70B": {**shape_of(80, 8192, 64, 8, 28672, LLAMA), "vocabulary": 32000},
    "LLAMA3-8B": {**shape_of(32, 4096, 32, 8, 14336, LLAMA), "vocabulary": 128256},
    "LLAMA3-70B": {**shape_of(80, 8192, 64, 8, 28672, LLAMA), "vocabulary": 128256},
    "LLAMA3-405B": {**shape_of(126, 16384, 128, 8, 53248, LLAMA), "vocabulary": 128256},
    "NEMOTRON-8B": {**shape_of(32, 4096, 32, 32, 16384, NEMOTRON), "vocabulary": 256000},
    "NEMOTRON-22B": {**shape_of(40, 6144, 48, 48, 24576, NEMOTRON), "vocabulary": 256000},
    "NEMOTRON-340B": {**shape_of(96, 18432, 96, 8, 73728, NEMOTRON), "vocabulary": 256000},
    # Nanotron's benchmark script: no grouped heads, embeddings tied below 4B.
    "nanotron-1.34": {**shape_of(16, 2048, 32, 32, 8192, LLAMA | {"tied": 1}), "vocabulary": 131072},
    "nanotron-3.57": {**shape_of(28, 3072, 32, 32, 8192, LLAMA | {"tied": 1}), "vocabulary": 131072},
    "nanotron-8.86": {**shape_of(32, 4096, 32, 32, 14336, LLAMA), "vocabulary": 131072},
    "nanotron-80.0": {**shape_of(80, 8192, 64, 64, 28672, LLAMA), "vocabulary": 131072},
}


def line_of(**values: object) -> Line:
    defaults: dict[str, object] = {
        "cp": 1, "ep": 1, "zero": 0, "sequence_parallel": 0, "schedule": "1f1b", "recompute": "none",
        "dtype": "bfloat16", "gradient_dtype": "float32", "flash": 1, "overlap_tensor": 0,
        "overlap_expert": 0, "predict_ahead": 0,
    }  # fmt: skip
    merged = {**defaults, **values}
    if merged.get("chunks_per_stage"):
        merged["schedule"] = "interleaved-1f1b"
    return {name: str(merged.get(name, "")) for name in COLUMNS}
