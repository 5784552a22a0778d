"""A plan as a file that `cumulo train` runs: a training configuration with the plan's layout. Written by
`cumulo plan train --out`."""

from pathlib import Path
from typing import Any

import yaml

from cumulo.base.quantities import GIB, quantity
from cumulo.base.strict import build, read_yaml
from cumulo.errors import ConfigError
from cumulo.plan.job import OPERATIONS, TrainJob
from cumulo.plan.search.run_cost import Stalls, Storage
from cumulo.plan.search.search import Plan
from cumulo.spec.cluster import Cluster
from cumulo.spec.model import ModelSpec
from cumulo.spec.model_file import plain

# What the trainer makes new models of, and what such a model must not have to be one of them.
_FAMILIES = ("llama", "qwen3", "mixtral", "qwen3_moe")
_USUAL_WARMUP_STEPS = 20  # of a training configuration that says nothing of it; there must be more steps


def plan_text(
    plan: Plan, cluster: Cluster, stalls: Stalls, storage: Storage, command: str, steps: int | None = None
) -> str:
    """YAML; what was predicted stands in the comments above it, below the command that predicted it."""
    if obstacle := obstacle_of(plan):
        raise ConfigError(f"this plan cannot be run by `cumulo train`: {obstacle}")
    job, estimate = plan.job, plan.estimate
    settings: dict[str, Any] = {
        "batch_sequences": job.global_batch,
        "micro_batch": job.micro_batch,
        "dtype": job.dtype,
        "recompute": job.recompute == "full",
        "recompute_operations": list(job.recomputed_operations),
        "offload_activations": job.offload_activations,
        "model": _model(job.model, 128 * job.layout.tp),
        "data": {
            "sequence_length": job.sequence_length,
            "tokenizer": {"vocab_size": job.model.vocab_size},
        },
        "optimizer": {"kind": job.optimizer, "offload": job.offload_optimizer},
        "checkpoint": {
            "every_steps": max(1, round(stalls.interval_s / estimate.step_s)),
            "asynchronous": storage.asynchronous,
        },
        "layout": plain(job.layout),
    }
    if steps is not None:
        settings = {"steps": steps} | settings
        if steps <= _USUAL_WARMUP_STEPS:
            settings["schedule"] = {"warmup_steps": steps - 1}
    yours = "data.sources, data.tokenizer"
    if job.lora_rank is not None:
        settings["lora"] = {
            "rank": job.lora_rank,
            "alpha": 2.0 * job.lora_rank,
            "targets": list(job.lora_targets),
        }
        yours += ", model.start_from"
    rank = "GPU"
    if cluster.device.generation == "cpu":
        settings["device"], rank = "cpu", "CPU"
    peak = f", {quantity(estimate.memory.total / GIB, 'GiB')}" if estimate.memory else ""
    ends = estimate.interval
    head = (
        f"# {command}\n"
        f"# predicted: {quantity(estimate.step_s, 's')} a step (90% interval: {quantity(ends.low, 's')} to "
        f"{quantity(ends.high, 's')}), {quantity(estimate.tokens_per_s, 'tokens/s')}{peak} on a {rank}\n"
        f"# {yours} and the learning rate are yours to set: `cumulo train FILE`\n"
    )
    return head + yaml.safe_dump(settings, sort_keys=False)


def obstacle_of(plan: Plan) -> str | None:
    """Why the trainer cannot run a plan; None: it can."""
    job = plan.job
    if job.model.family not in _FAMILIES:
        return f"it makes new models of the families {', '.join(_FAMILIES)}, not {job.model.family}"
    if job.split_model is not job.model:
        return f"it does not repeat {job.model.kv_heads} key/value heads over tp {job.layout.tp}"
    if job.dtype not in ("float32", "bfloat16"):
        return f"it computes in float32 or bfloat16, not {job.dtype}"
    if job.recompute == "selective" or job.recompute_layers is not None:
        return f"it recomputes all layers, or operations of all of them ({', '.join(OPERATIONS)})"
    if job.predict_ahead:
        return "it has no extra layers that predict further tokens (--mtp)"
    if job.lora_rank is not None and job.frozen_bits != 16:
        return f"it keeps frozen weights in 16 bits, not in {job.frozen_bits}"
    if job.moment_dtype != "float32" or job.narrow_activations:
        return "it keeps the optimizer's moments in 32 bits, and activations as wide as they are computed"
    return None


def _model(spec: ModelSpec, vocab_multiple: int) -> dict[str, Any]:
    names = ("family", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn_hidden", "rope_theta", "norm_eps",
             "tied_embeddings")  # fmt: skip
    fields: dict[str, Any] = {name: getattr(spec, name) for name in names}
    fields["vocab_multiple"] = vocab_multiple
    if spec.moe is not None:
        fields["moe"] = plain(spec.moe)
    return fields


SUFFIXES = (".yaml", ".yml")


def job_text(job: TrainJob) -> str:
    """All but the model, which the command names; what has its default is left out."""
    content = {name: value for name, value in plain(job).items() if name != "model"}
    return yaml.safe_dump(content, sort_keys=False)


def read_job(path: Path, model: ModelSpec, gpus: int) -> TrainJob:
    content = read_yaml(path, "the job")
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} has no table of settings; write one with: cumulo plan train --save-job FILE"
        )
    if "model" in content:
        raise ConfigError(f"{path} has a model; the command names it, so remove it there")
    job = build(TrainJob, {**content, "model": plain(model)}, str(path))
    if job.layout.world != gpus:
        raise ConfigError(
            f"{path} has a layout of {job.layout.world:,} GPUs, but the cluster has {gpus:,}; use --gpus "
            f"{job.layout.world}"
        )
    return job
