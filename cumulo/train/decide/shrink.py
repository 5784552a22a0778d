"""A user's configuration, made small enough to run twice on a laptop: same kind of model, same layout where
possible. Pure; called by `verify.py`."""

import math
from dataclasses import dataclass, replace

from cumulo.layout.layout import Layout, pipeline_chunks
from cumulo.pipeline.decide.catalog import family
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec
from cumulo.train.decide.config import DataConfig, ModelConfig, ScheduleConfig, TrainConfig

MOST_PROCESSES = 16
_HEAD = 4  # elements of a head, of a latent vector's parts
_AXES = ("dp", "tp", "pp", "cp")


@dataclass(frozen=True, slots=True)
class Shrunk:
    spec: ModelSpec
    config: TrainConfig


def shrink(config: TrainConfig, spec: ModelSpec, steps: int) -> Shrunk:
    """Sizes that keep what the layout divides by, in float64 on the CPU."""
    layout = shrink_layout(config.layout)
    small = shrink_spec(spec, layout)
    length = _multiple(2 * layout.cp * layout.tp, 16)
    micro_batches = 2
    if layout.pp > 1:
        chosen = family(layout.schedule)
        micro_batches = max(layout.pp, layout.pp * chosen.micro_batches_per_stage, 2)
        micro_batches += micro_batches % 2  # some schedules take halves
    if small.sliding_window is not None:
        small = replace(small, sliding_window=length // 2)
    return Shrunk(
        replace(small, max_context=length),
        replace(
            config,
            steps=steps,
            batch_sequences=layout.dp * micro_batches,
            micro_batch=1,
            device="cpu",
            dtype="float64",
            # The shrunk spec comes with it; of a model that exists elsewhere a configuration asks nothing.
            model=ModelConfig(start_from="the shrunk model"),
            data=DataConfig(sequence_length=length),
            schedule=ScheduleConfig("constant", warmup_steps=0),
            lora=None if config.lora is None else replace(config.lora, rank=min(config.lora.rank, _HEAD)),
            layout=layout,
            expert_rebalance_every_steps=min(config.expert_rebalance_every_steps, 2),
        ),
    )


def shrink_layout(layout: Layout) -> Layout:
    """Every axis that is used stays used; the largest gives way until there are few enough processes."""
    while layout.world > MOST_PROCESSES:
        axis = max(_AXES, key=lambda name: getattr(layout, name))
        size = getattr(layout, axis)
        smaller = max(number for number in range(2, size) if size % number == 0 or number == 2)
        layout = _with_axis(layout, axis, smaller)
    return layout


def _with_axis(layout: Layout, axis: str, size: int) -> Layout:
    """The other settings follow: they must divide what is left."""
    dp, cp = (size if axis == name else getattr(layout, name) for name in ("dp", "cp"))
    sizes = {"ulysses": math.gcd(layout.ulysses, cp), "ep": math.gcd(layout.ep, dp * cp), axis: size}
    if layout.shard is not None:
        sizes["shard"] = math.gcd(layout.shard, dp)
    return replace(layout, **sizes)  # type: ignore[arg-type]


def shrink_spec(spec: ModelSpec, layout: Layout) -> ModelSpec:
    layers = _multiple(pipeline_chunks(layout), 2)
    cut = layout.tp * layout.ulysses
    kv_heads = _multiple(cut, 2)
    heads = kv_heads * (2 if spec.heads > spec.kv_heads else 1)
    mla = spec.mla
    if mla is not None:
        heads = kv_heads
        mla = MLASpec(
            None if mla.q_rank is None else 2 * _HEAD, 2 * _HEAD, _HEAD, _HEAD, _HEAD, norm_eps=mla.norm_eps
        )
    windowed = spec.windowed_layers
    return replace(
        spec,
        vocab_size=_multiple(layout.tp, 32),
        hidden=16,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_HEAD,
        ffn_hidden=_multiple(layout.tp, 24),
        rope_scaling=None,
        windowed_layers=None if windowed is None else tuple(n for n in range(layers) if n % 2 == 0),
        moe=None if spec.moe is None else _shrink_experts(spec.moe, layout),
        mla=mla,
    )


def _shrink_experts(moe: MoESpec, layout: Layout) -> MoESpec:
    groups = min(moe.groups, 2)
    return replace(
        moe,
        experts=_multiple(math.lcm(layout.ep, 2 * groups), 4),
        experts_per_token=min(moe.experts_per_token, 2),
        expert_hidden=_multiple(layout.tp, 8),
        shared_hidden=_multiple(layout.tp, 8) if moe.shared_hidden else 0,
        groups=groups,
        top_groups=1,
        dense_layers=(0,) if moe.dense_layers else (),
    )


def _multiple(of: int, least: int) -> int:
    return -(-least // of) * of
