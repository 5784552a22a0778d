"""A prefill engine on the GPU's kernels whose KV goes over a network: each layer is told of, in order, and only for
steps that somebody waits for."""

from queue import SimpleQueue

import pytest

from tests.engine.tiny_cuda_engine import SPECS, make_decoder, make_engine, use_few_programs  # isort: skip
from cumulo.engine.decide.core.request import Request
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import Send
from cumulo.engine.decide.transfer.prefilling import Outgoing

pytestmark = pytest.mark.long


def test_every_layer_of_a_step_that_is_waited_for_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    engine = make_engine(make_decoder(SPECS["dense"]), True)
    runner, scheduler, told = engine.runner, engine.scheduler, SimpleQueue[tuple[int, int]]()

    def teller(sends: list[Send]):
        return lambda layer: told.put((sends[0].tokens, layer))

    runner.layer_teller = teller  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0, max_tokens=1)
    for name, sends in (("alone", False), ("1.7", True)):
        request = Request(name, [3, 5, 8, 13, 21], params, seed=0, arrived_s=0.0)
        request.prefill_only = sends
        scheduler.add(request)
        if sends:
            scheduler.prefilling.outgoing[request.sequences[0].request.id] = Outgoing(request.sequences[0], 7)
        plan = scheduler.plan(0.0)
        assert plan is not None
        runner.submit(plan).result()
        scheduler.fail_step(plan, "only its layers were of interest", 0.0)
        if sends:  # a GPU's layers are told of when they have been computed, by a thread
            layers = range(SPECS["dense"].layers)
            assert [told.get(timeout=60) for _ in layers] == [(5, layer) for layer in layers]
        assert told.empty()
    runner.close()
