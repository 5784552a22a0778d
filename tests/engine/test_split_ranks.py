"""Prefill and decode engines over tensor-parallel ranks: KV is handed over rank by rank, and the answers are those
of one engine on one rank, in float64."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed", reason="this torch has no distributed package")

from cumulo.engine.assembly import Assembly, assemble
from cumulo.engine.config import EngineConfig
from cumulo.engine.engine import Engine
from cumulo.engine.outputs import RequestOutput
from cumulo.engine.play.transfer_wire import RankCaches, greeting_of
from cumulo.errors import ConfigError
from cumulo.models.batch import KVCache
from tests.engine.equivalence import Lengths, Request, draw_requests
from tests.engine.guided_engine import VOCAB
from tests.engine.ranked_models import CONFIGS, save_model
from tests.engine.split_engines import PATIENCE_S, TurningEngine, run_split, wait_for_peers
from tests.engine.test_ranks import TIGHT, assert_same
from tests.engine.tiny_engine import make_decoder


@contextmanager
def started(model: Path, **options: object) -> Iterator[Assembly]:
    assembly = assemble(model, EngineConfig(**{**TIGHT, "kv_blocks": 40, **options}), True, None)  # type: ignore[arg-type]
    try:
        yield assembly
    finally:
        if assembly.engine.link is not None:
            assembly.engine.link.close()
        assembly.player.runner.close()


@contextmanager
def turning(engine: Engine) -> Iterator[None]:
    thread = TurningEngine(engine)
    try:
        yield
        thread.finish()
    finally:
        thread.stop()


def ask(engine: Engine, requests: list[Request]) -> None:
    for index, (prompt, params, priority, salt) in enumerate(requests):
        engine.add(prompt, params, request_id=f"r{index}", priority=priority, cache_salt=salt)


def compare(model: Path, folder: Path, transport: str, **layout: int) -> None:
    requests = draw_requests(random.Random(5), 10, VOCAB - 3, Lengths(prefix=30, own=15, answer=8))
    address = f"unix:{folder}/prefill.sock" if transport == "unix" else "tcp:127.0.0.1:0"
    with started(model) as one:
        ask(one.engine, requests)
        expected: dict[str, RequestOutput] = {}
        while one.engine.has_work:
            expected |= {output.request_id: output for output in one.engine.step().finished}
    with started(model, role="prefill", transfer_address=address, **layout) as prefill:
        reached = prefill.engine.link.address  # type: ignore[union-attr]
        peers = (f"p0={reached}",)
        with (
            started(model, role="decode", prefill_engines=peers, **layout) as decode,
            turning(prefill.engine),
        ):
            wait_for_peers(decode.engine)
            decode.engine.scheduler.transfers.stall_s = PATIENCE_S
            ask(decode.engine, requests)
            got = run_split(decode.engine)
            transfers = decode.engine.scheduler.transfers
            assert transfers.landed > 0 and transfers.failed == 0, "no prompt was computed elsewhere"
    assert set(got) == set(expected)
    for name, output in got.items():
        assert_same(output, expected[name])


@pytest.mark.long
def test_engines_with_roles_over_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    compare(save_model("dense", tmp_path), tmp_path, "unix", tp=2)


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize(
    ("model", "layout"), [*((name, {"tp": 2}) for name in CONFIGS), ("experts", {"ep": 2})], ids=str
)
def test_all_models_over_ranks_with_roles_say_what_one_says(
    tmp_path: Path, model: str, layout: dict[str, int], transport: str
) -> None:
    compare(save_model(model, tmp_path), tmp_path, transport, **layout)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [({"pp": 2}, "tensor-parallel ranks only: omit pp and dp"), ({"tp": 2, "dp": 2}, "omit pp and dp")],
    ids=str,
)
def test_layouts_that_do_not_go_with_a_role_are_refused(
    tmp_path: Path, layout: dict[str, int], reason: str
) -> None:
    options = {**TIGHT, "role": "decode", "prefill_engines": ("unix:/nowhere",), **layout}
    with pytest.raises(ConfigError, match=reason):
        assemble(save_model("dense", tmp_path), EngineConfig(**options), True, None)  # type: ignore[arg-type]


def test_engines_of_another_number_of_ranks_are_refused() -> None:
    spec = make_decoder("latent").spec
    caches = [KVCache(spec, 4, 8) for _ in range(2)]
    alone, two = greeting_of(caches[0], "m"), greeting_of(RankCaches(caches), "m")
    assert "its tp is 2, here it is 1" in alone.differs_from(two) and not two.differs_from(two)
