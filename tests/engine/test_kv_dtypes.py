"""An engine whose KV cache has 8 bits: answers do not depend on where blocks have been."""

from pathlib import Path

import pytest
import torch

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.engine import Engine
from cumulo.engine.memory.memory_plan import plan_memory
from cumulo.engine.play.disk_tier import KvFiles, TierMover
from cumulo.engine.play.player import kv_cache
from cumulo.errors import CumuloError
from cumulo.models.batch import KVCache
from tests.engine.tiny_engine import SPECS, VOCAB, make_decoder, make_engine, run

DECODER = make_decoder("dense")
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[(seed * 11 + j * 7) % VOCAB for j in range(20)] for seed in range(3)]
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    requests = [engine.add(prompt, PARAMS) for prompt in prompts]
    found = run(engine)
    return [found[request.id].samples[0].token_ids for request in requests]


@pytest.mark.parametrize(("kind", "model"), [("int8", "dense"), ("fp8", "dense"), ("fp8", "latent")])
def test_preempted_and_cached_sequences_get_the_same_tokens(kind: str, model: str) -> None:
    dtype, decoder = KINDS[kind], make_decoder(model)
    alone = [
        answers(make_engine(decoder, blocks=40, block_size=4, kv_dtype=dtype), [one])[0] for one in PROMPTS
    ]
    tight = make_engine(decoder, blocks=14, block_size=4, tier_blocks=20, kv_dtype=dtype)
    assert answers(tight, PROMPTS) == alone
    assert answers(tight, PROMPTS[:1]) == alone[:1]  # from the prefix cache


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_come_back_from_host_memory_and_disk(kind: str, tmp_path: Path) -> None:
    expected = answers(make_engine(DECODER, blocks=40, block_size=4, kv_dtype=KINDS[kind]), PROMPTS[:1])
    for _ in range(2):  # the second engine finds the files of the first
        engine = make_engine(DECODER, blocks=8, block_size=4, tier_blocks=20, disk=True, kv_dtype=KINDS[kind])
        engine.mover = TierMover(KvFiles(tmp_path, b"m" * 16, 1 << 30), engine.runner.pool, engine.scheduler)
        engine.scheduler.tiers.disk_s_per_block = 0.0
        for prompt in PROMPTS[:2]:
            answers(engine, [prompt])
        request = engine.add(PROMPTS[0], PARAMS)
        output = run(engine)[request.id]
        assert any(event.kind == "fetched" for event in output.story.events)
        assert [output.samples[0].token_ids] == expected
        engine.mover.save(lambda plan, engine=engine: engine.runner.submit(plan).result(), 5.0)
        engine.mover.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_ledger_counts_the_bytes_that_the_cache_takes(kind: str) -> None:
    config = EngineConfig(kv_dtype=kind, kv_blocks=16).settled("cpu")
    plan = plan_memory(SPECS["dense"], 1 << 20, config, 8 << 30)
    cache = KVCache(SPECS["dense"], 16, config.block_size, KINDS[kind])
    assert plan.ledger["kv cache"].predicted == cache.nbytes


def test_what_8_bits_cannot_store_is_refused_by_name() -> None:
    with pytest.raises(CumuloError, match="choose fp8"):
        EngineConfig(kv_dtype="int8").settled("cuda")
    with pytest.raises(CumuloError, match="latent attention"):
        kv_cache(SPECS["latent"], EngineConfig(kv_dtype="int8").settled("cpu"), None, torch.float32)
