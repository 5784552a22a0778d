"""A line of `published_training.csv`: its columns, and what models of published tables are made of. The readers
of `published_tables` and `published_nemo` make lines with it.
"""

from collections.abc import Iterator, Mapping

from cumulo.errors import ConfigError

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


def read_nemo(given: Given) -> Iterator[Line]:
    """NeMo's and Megatron-Bridge's summaries, less what a job here cannot express: fine-tuning rows, which
    print no sequence length (packed samples of unknown lengths); 4-bit rows; mixtures that drop tokens.

    Expert-parallel ranks of Megatron-Bridge include the tensor-parallel ones, each with whole experts; here those
    share the experts' matrices, which comes to the same work. A chunk has a layer at least."""
    tuned = given.get("section", "Pretraining") != "Pretraining"
    name = given["model"].upper()
    if tuned or "FP4" in given["precision"] or "TOKENDROP" in name:
        return
    tp, pp, cp, gpus = (int(given[name]) for name in ("tp", "pp", "cp", "num_gpus"))
    container = given["container"].removeprefix("NeMo")
    bridge = container >= "25"
    shape, layers = _named_model(given["model"])
    dp = gpus // tp // pp // cp
    ep = _count(given.get("ep"))
    virtual = min(_count(given.get("vp")), layers // pp)
    precision = given["precision"].lower()
    sharded = given.get("fsdp") not in (None, "", "0", "n/a")
    yield line_of(
        id=f"nemo-{container}-{given['model'].lower()}-{gpus}"
        if not bridge
        else f"bridge-{container}-{given['system'].removeprefix('DGX-').lower()}-"
        f"{given['model'].lower().replace(' ', '-')}-{gpus}-{precision}",
        source=f"{'megatron-bridge' if bridge else 'nemo'}-{container}",
        software=_bridge_generation(container, name) if bridge else "megatron-core-2024",
        node=_NODES[given["system"]],
        gpus=gpus,
        **shape,
        sequence=given["sequence_length"],
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=min(max(1, ep // tp), dp * cp),
        zero=3 if sharded else 1,
        sequence_parallel=int(tp > 1),
        chunks_per_stage=virtual if virtual > 1 and pp > 1 else "",
        micro_batch=given["mbs"],
        global_batch=given["gbs"],
        dtype="bfloat16" if precision == "bf16" else "float8",
        gradient_dtype="bfloat16" if bridge else "float32",
        overlap_tensor=int(tp > 1),
        **(_bridge_mixture(container, given["system"], name, ep) if "model" in shape else {}),
        predict_ahead=int("DEEPSEEK" in name and ("W/ MTP" in name or (bridge and container != "25.11"))),
        reported=given["tokens_sec_gpu"],
        unit=TOKENS,
    )


def _count(text: str | None) -> int:
    """The number of ranks or chunks: 1 where a table has nothing to say."""
    return int(text) if text and text != "n/a" else 1


def _bridge_generation(container: str, model: str) -> str:
    """Since 26.06 a step is one graph, and an expert's products are fused with what lies between; not Kimi's."""
    return "megatron-bridge-2026" if container >= "26.06" and "KIMI" not in model else "megatron-bridge-2025"


def _bridge_mixture(container: str, system: str, model: str, ep: int) -> dict[str, object]:
    """What the recipes (scripts/performance/configs) set and the tables do not print.

    Tokens travel by NCCL's all-to-all with GPT-OSS before 26.06, with Qwen3-235B on x86 nodes, and with Qwen3-30B
    there up to 26.02. The exchange is overlapped with Qwen3-235B on H100, and DeepSeek-V3 over several B200
    nodes. GPT-OSS computes norms and activations again where memory is short.
    """
    x86 = not system.startswith("DGX-GB")
    waits = "OSS" in model and container < "26.06"
    waits = waits or (x86 and ("235B" in model or ("30B" in model and container <= "26.02")))
    overlapped = ("235B" in model and "H100" in system) or (
        "DEEPSEEK" in model and "B200" in system and x86 and ep > 8
    )
    again = "OSS" in model and "26.02" <= container < "26.06" and "300" not in system
    return {
        "expert_exchange": "all-to-all" if waits else "once",
        "overlap_expert": int(overlapped),
        "recompute": "norm+activation" if again else "none",
    }


_NODES = {
    "DGX-H100": "dgx-h100",
    "DGX-B200": "dgx-b200",
    "DGX-B300": "dgx-b300",
    "DGX-GB200": "gb200-nvl72",
    "DGX-GB300": "gb300-nvl72",
}
# Mixtures are taken from the catalogue: name and layers.
_MIXTURES = {
    "DEEPSEEKV3": ("deepseek-v3", 61),
    "QWEN3-30B-A3B": ("qwen3-30b-a3b", 48),
    "QWEN3-235B-A22B": ("qwen3-235b-a22b", 94),
    "GPT-OSS-120B": ("gpt-oss-120b", 36),
    "KIMI-K2": ("kimi-k2", 61),
}


def _named_model(name: str) -> tuple[dict[str, object], int]:
    """Its columns, and its layers."""
    known = name.upper().split(" (")[0].replace("_", "-").replace(" ", "-").replace("LLAMA3.1", "LLAMA3")
    if known in _MIXTURES:
        return {"model": _MIXTURES[known][0]}, _MIXTURES[known][1]
    if known not in MODELS:
        raise ConfigError(f"the sizes of {name} are not known; known are: {', '.join([*MODELS, *_MIXTURES])}")
    return dict(MODELS[known]), MODELS[known]["layers"]
