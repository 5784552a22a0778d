"""A whole engine on a tiny random model in float64, for tests that compare tokens exactly."""

import torch

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.engine import Engine
from cumulo.engine.outputs import RequestOutput
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec
from tests.engine.invariants import problems

VOCAB = 61
EOS = 7

BASE = dict(
    vocab_size=VOCAB, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_hidden=48, max_context=512,
    eos_token_ids=(EOS,),
)  # fmt: skip
SPECS = {
    "dense": ModelSpec(family="tiny", **BASE),
    "window": ModelSpec(family="tiny", sliding_window=6, qk_norm=True, tied_embeddings=True, **BASE),
    "experts": ModelSpec(
        family="tiny", moe=MoESpec(experts=6, experts_per_token=2, expert_hidden=16), **BASE
    ),
    "latent": ModelSpec(
        family="tiny",
        mla=MLASpec(q_rank=None, kv_rank=12, nope_head_dim=8, rope_head_dim=4, value_head_dim=8),
        **{**BASE, "head_dim": 12},
    ),
}


def make_decoder(name: str) -> Decoder:
    decoder = Decoder(SPECS[name], torch.float64)
    generator = torch.Generator().manual_seed(3)
    for parameter in decoder.parameters():
        scale = 0.2 if parameter.dim() > 1 else 0.3
        offset = 0.0 if parameter.dim() > 1 else 1.0
        parameter.data = offset + scale * torch.randn(
            parameter.shape, generator=generator, dtype=torch.float64
        )
    return decoder


def make_engine(
    decoder: Decoder,
    *,
    blocks: int,
    overlap: bool = False,
    kv_dtype: torch.dtype = torch.float64,
    **options,
) -> Engine:
    defaults = dict(block_size=16, max_context=256, max_running=8, max_tokens_per_step=512)
    config = SchedulerConfig(blocks=blocks, **{**defaults, **options})
    cache = KVCache(decoder.spec, config.blocks, config.block_size, kv_dtype)
    # Whatever a block held before must not matter: fill the cache with nonsense.
    nonsense = 1e3 if kv_dtype == torch.float64 else 100
    cache.key_storage.fill_(nonsense)
    cache.value_storage.fill_(-nonsense)
    runner = TorchRunner(
        decoder, cache, max_slots=config.max_running, max_context=config.max_context, eos_token_ids=(EOS,),
        host_blocks=config.tier_blocks, overlap=overlap,
    )  # fmt: skip
    if runner.pool is not None:
        for block in range(runner.pool.blocks):
            runner.pool.views(block)[0].fill_(-nonsense)
    engine = Engine(Scheduler(config), runner, None, vocab_size=VOCAB, eos_ids=(EOS,), overlap=overlap)
    if config.tier_blocks:
        engine.scheduler.costs.swap_s_per_block = 0.0  # so that whatever is found is fetched
    return engine


def run(engine: Engine, between=None) -> dict[str, RequestOutput]:
    finished: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_work:
        for output in engine.step().finished:
            finished[output.request_id] = output
        assert problems(engine.scheduler) == []
        steps += 1
        assert steps < 20_000
        if between is not None:
            between(steps)
    return finished
