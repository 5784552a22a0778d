"""Peak memory of Megatron-LM's functional tests (NVIDIA/Megatron-LM, tests/functional_tests, commit d98e8a64), as
measured on the last rank by the framework's allocator.

ROWS are some of them, one for each way to split; `job_of_row` reads the whole table where it is at hand.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout
from cumulo.plan.job import Recompute, TrainJob
from cumulo.spec.model import ModelSpec, MoESpec


@dataclass(frozen=True)
class MeasuredPeak:
    name: str
    job: TrainJob
    peak_bytes: int


def _gpt(
    name: str, peak_bytes: int, *, flash: bool, swiglu: bool = False, recompute: Recompute = "none",
    experts: MoESpec | None = None, tied: bool = True, **layout: Any,
) -> MeasuredPeak:  # fmt: skip
    """Their small GPT: 12 layers, width 512, 8 heads, 1,024 tokens, micro-batch 4, batch 32, 8 GPUs."""
    spec = ModelSpec(
        "gpt", 50257, 512, 12, 8, 8, 64, 2048, 1024, tied_embeddings=tied, qkv_bias=True, output_bias=True,
        mlp_bias=experts is None, gated_ffn=swiglu, learned_positions=True, norm_bias=True, moe=experts,
    )  # fmt: skip
    model_ranks = math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "cp"))
    split = Layout(dp=8 // model_ranks, **layout)
    job = TrainJob(
        spec, split, 32, 1024, 4, recompute=recompute, flash_attention=flash, fused_loss=False, dropout=True
    )  # fmt: skip
    return MeasuredPeak(name, job, peak_bytes)


ROWS = (
    _gpt("tp1_pp1_full_recompute_a100", 2534070272, flash=False, recompute="full"),
    _gpt("tp1_pp1_distributed_optimizer_a100", 4607767040, flash=False, zero=1),
    _gpt("tp4_pp1_a100", 1597485568, flash=False, tp=4),
    _gpt("tp1_pp2_a100", 3547033088, flash=False, pp=2),
    _gpt("tp1_pp4_a100", 2195420160, flash=True, pp=4),
    _gpt("tp1_pp4_vp1_a100", 4122704384, flash=False, pp=4, schedule="interleaved-1f1b", chunks_per_stage=3),
    _gpt("tp1_pp4_swiglu_h100", 2211485184, flash=True, pp=4, swiglu=True),
    _gpt("tp2_pp2_gb200", 1437084160, flash=True, tp=2, pp=2),
    _gpt("tp2_pp2_cp2_a100", 857134592, flash=True, tp=2, pp=2, cp=2, sequence_parallel=True),
    _gpt("tp1_pp2_cp4_a100", 1250505728, flash=True, pp=2, cp=4),
    _gpt("tp4_pp2_distributed_optimizer_h100", 844288512, flash=True, tp=4, pp=2, zero=1),
    _gpt(
        "tp2_pp2_4experts_a100", 2080728064, flash=False, tp=2, pp=2, ep=2, sequence_parallel=True,
        experts=MoESpec(4, 1, 2048),
    ),
    _gpt(
        "tp1_pp2_8experts_distributed_optimizer_a100", 2797671424, flash=True, pp=2, ep=2, zero=1,
        experts=MoESpec(8, 1, 2048),
    ),
)  # fmt: skip


def job_of_row(row: Mapping[str, str]) -> TrainJob | None:
    """The job of a row of the whole table; None for what a TrainJob cannot say.

    Left out: other families than GPT, sharding by Megatron's FSDP, 8-bit products, latent attention, recomputation
    of single modules, experts split differently from the rest, two models at once (distillation, reinforcement
    learning), and large models of which the number of GPUs is not told (the small ones run on 8).
    """
    unknown = ("use-megatron-fsdp", "fp8-format", "multi-latent-attention", "recompute-modules")
    told = row["gpus"] or row["hidden-size"] == "512"
    experts_alike = row["expert-tensor-parallel-size"] in ("", row["tensor-model-parallel-size"])
    if (
        row["family"] not in ("gpt", "moe", "mixtral")
        or not row["mem_max_alloc_bytes"]
        or any(row[name] for name in unknown)
        or not told
        or (row["num-experts"] and not experts_alike)
        or any(word in row["test_case"] for word in ("distill", "grpo"))
    ):
        return None
    try:
        return _job(row)
    except ConfigError:
        return None


def _job(row: Mapping[str, str]) -> TrainJob:
    def number(name: str, default: int) -> int:
        return int(row[name] or default)

    hidden, layers, heads = (int(row[name]) for name in ("hidden-size", "num-layers", "num-attention-heads"))
    width = number("ffn-hidden-size", 4 * hidden)
    experts = None
    if row["num-experts"]:
        experts = MoESpec(
            int(row["num-experts"]),
            number("moe-router-topk", 2),
            number("moe-ffn-hidden-size", width),
            number("moe-shared-expert-intermediate-size", 0),
        )
    biased = "disable_bias" not in row["test_case"]
    spec = ModelSpec(
        family="gpt",
        vocab_size=number("vocab-size", 50257),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=number("num-query-groups", 8) if row["group-query-attention"] else heads,
        head_dim=number("kv-channels", hidden // heads),
        ffn_hidden=width,
        max_context=int(row["seq-length"]),
        tied_embeddings=not row["untie-embeddings-and-output-weights"],
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased and experts is None,
        gated_ffn=bool(row["swiglu"]),
        learned_positions="rope" not in row["test_case"],
        norm_bias=True,
        moe=experts,
    )
    tp, pp, cp = (
        number(f"{name}-parallel-size", 1) for name in ("tensor-model", "pipeline-model", "context")
    )
    chunks = number("num-virtual-stages-per-pipeline-rank", 1)
    if row["num-layers-per-virtual-pipeline-stage"]:
        chunks = layers // pp // int(row["num-layers-per-virtual-pipeline-stage"])
    layout = Layout(
        dp=number("gpus", 8) // (tp * pp * cp),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=number("expert-model-parallel-size", 1),
        zero=1 if row["use-distributed-optimizer"] else 0,
        sequence_parallel=bool(row["sequence-parallel"]) and tp > 1,
        schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
        chunks_per_stage=chunks if chunks > 1 else None,
    )
    return TrainJob(
        spec,
        layout,
        number("global-batch-size", 32),
        int(row["seq-length"]),
        int(row["micro-batch-size"]),
        recompute=row["recompute-granularity"] or "none",  # type: ignore[arg-type]
        dtype="float16" if row["fp16"] else "bfloat16",
        optimizer="muon" if row["optimizer"] == "muon" else "adamw",
        # Their own implementation stores the scores; Transformer Engine does when told to.
        flash_attention=row["transformer-impl"] != "local" and row["attention-backend"] != "unfused",
        fused_loss=False,
        dropout=True,
    )
