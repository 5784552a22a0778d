"""The GPU's runner and decoder, played by Triton's interpreter on a tiny model: the same tokens as the torch
runner's.

With a GPU the same tests run on it, captured graphs included.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.tiny_cuda_engine import DEVICE, SPECS, make_decoder, make_engine, use_few_programs  # isort: skip
from cumulo.engine.adapters import AdapterStore
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.engine import Engine
from cumulo.engine.memory.needs import (
    gpu_buffer_bytes,
    gpu_logit_bytes,
    gpu_table_bytes,
    quantised_saved_bytes,
)
from cumulo.engine.play.runner_cuda import CudaRunner
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.models.adapters.bank import AdapterBank
from cumulo.models.adapters.files import read_adapter
from cumulo.models.batch import KVCache
from cumulo.models.play.cuda_decoder import CudaDecoder
from cumulo.spec.counting import weight_bytes
from tests.engine.random_planner import RandomPlanner
from tests.engine.random_planner import Sequence as PlannedSequence
from tests.models.adapter_files import write_adapter
from tests.thorough import rare

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)


def run(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]], preempted: list[int] | None = None
) -> dict[str, list[list[int]]]:
    for index, (prompt, params) in enumerate(requests):
        engine.add(prompt, params, request_id=str(index))
    outputs: dict[str, list[list[int]]] = {}
    while engine.has_work:
        for done in engine.step().finished:
            assert done.error is None, done.error
            if preempted is not None:
                preempted.append(done.story.preemptions)
            outputs[done.request_id] = [sample.token_ids for sample in done.samples]
    engine.runner.close()
    return outputs


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(8, 53, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(  # "dense" and "window": below
    "name", ["experts", pytest.param("latent", marks=pytest.mark.long), *rare("window", "latent experts")]
)
def test_the_kernels_give_the_tokens_of_the_torch_runner(name: str) -> None:
    decoder = make_decoder(SPECS[name])
    requests = [
        (prompt(20, 1), SamplingParams(temperature=0, max_tokens=3)),
        (prompt(3, 2), SamplingParams(temperature=0.8, seed=5, max_tokens=3)),
        (
            prompt(40, 3),
            SamplingParams(temperature=0.7, top_p=0.8, top_k=9, seed=6, max_tokens=2, logprobs=2),
        ),
        (
            [*prompt(20, 1), 9],
            SamplingParams(temperature=0, repetition_penalty=1.4, min_tokens=2, max_tokens=3),
        ),
        (prompt(5, 4), SamplingParams(temperature=1, n=2, seed=8, max_tokens=3, ignore_eos=True)),
    ]
    expected = run(make_engine(decoder, on_kernels=False, overlap=False), requests)
    assert run(make_engine(decoder, on_kernels=True), requests) == expected


def test_draws_with_cuts_are_the_torch_runners_and_need_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_decoder(SPECS["dense"])
    requests = [
        (prompt(3, 1), SamplingParams(temperature=0.9, top_k=9, top_p=0.8, seed=1, max_tokens=2)),
        (prompt(2, 2), SamplingParams(temperature=1, seed=3, max_tokens=2)),
    ]
    expected = run(make_engine(decoder, on_kernels=False, overlap=False), requests)
    monkeypatch.delattr(CudaRunner, "_draw_on_host")
    assert run(make_engine(decoder, on_kernels=True), requests) == expected


@pytest.mark.parametrize(
    "name, way",
    [
        ("dense", dict()),
        # whose values are no memory of their own
        pytest.param("latent", dict(tier_blocks=12), marks=pytest.mark.long),
        *rare(("dense", dict(tier_blocks=12))),
    ],
)
def test_preemption_with_and_without_a_host_tier_changes_no_token(name: str, way: dict) -> None:
    decoder = make_decoder(SPECS[name])
    requests = [
        (prompt(14, seed), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)) for seed in range(3)
    ]
    expected = run(make_engine(decoder, on_kernels=False, overlap=False), requests)
    small = dict(blocks=4, max_running=3, max_context=64)
    preempted: list[int] = []
    engine = make_engine(decoder, on_kernels=True, **way, **small)
    assert run(engine, requests, preempted) == expected
    assert sum(preempted) > 0


@pytest.mark.long
def test_embeddings_and_prompt_log_probabilities_are_the_torch_runners() -> None:
    decoder = make_decoder(SPECS["dense"])
    found = []
    for on_kernels in (False, True):
        engine = make_engine(decoder, on_kernels)
        engine.add(prompt(60, 1), SamplingParams(pooling="mean"), request_id="a")
        engine.add(
            prompt(9, 2), SamplingParams(prompt_logprobs=1, max_tokens=1, temperature=0), request_id="b"
        )
        done = {}
        while engine.has_work:
            done |= {output.request_id: output for output in engine.step().finished}
        engine.runner.close()
        found.append(done)
    ours, theirs = torch.tensor(found[1]["a"].embedding), torch.tensor(found[0]["a"].embedding)
    assert torch.allclose(ours, theirs, atol=1e-5)
    for a, b in zip(found[1]["b"].prompt_logprobs, found[0]["b"].prompt_logprobs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.token == b.token and abs(a.logprob - b.logprob) < 1e-5)


def test_adapters_of_a_batch_give_the_torch_runners_tokens(tmp_path: Path) -> None:
    spec = SPECS["dense"]
    found = [
        read_adapter(write_adapter(tmp_path / str(rank), spec, rank=rank, seed=rank, strength=3.0), spec, 16)
        for rank in (3, 16)
    ]
    said = []
    for on_kernels in (False, True):
        decoder = make_decoder(spec)
        bank = AdapterBank(decoder, spec, 3, 16)
        engine = make_engine(decoder, on_kernels, bank=bank, max_tokens_per_step=8, max_loras=bank.slots)
        engine.adapters = AdapterStore(spec, engine.scheduler.adapters, 16, engine.runner.load_adapter)
        for index, weights in enumerate(found):
            engine.adapters.add(f"a{index}", weights)
        for index, adapter in enumerate(("a0", "", "a1")):
            params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
            engine.add(prompt(3, 1), params, request_id=str(index), adapter=adapter)
        # Its first step is the middle of a prompt, beside others' last tokens and alone.
        engine.add(prompt(19, 2), params, request_id="3", adapter="a1")
        answers = {}
        while engine.has_work:
            for done in engine.step().finished:
                assert done.error is None, done.error
                answers[done.request_id] = done.samples[0].token_ids
        engine.runner.close()
        said.append(answers)
    assert said[0] == said[1]
    assert len({tuple(said[0][name]) for name in "012"}) == 3  # of one prompt, with different adapters


def test_drafts_are_verified_and_change_no_token() -> None:
    decoder = make_decoder(SPECS["dense"])
    again = SamplingParams(temperature=0.0, max_tokens=6, logit_bias={9: 80.0})
    requests = [
        (prompt(3, 1) * 2, again),  # one token only: drafts come true
        (prompt(2, 2) * 3, SamplingParams(temperature=0.9, seed=4, max_tokens=3, logprobs=1)),
    ]
    plain = run(make_engine(decoder, False, overlap=False), requests)
    engine = make_engine(decoder, True, speculate="ngram")
    assert engine.scheduler.speculation is not None
    engine.scheduler.speculation.fixed_count = 3
    steps: list[StepPlan] = []
    submit = engine.runner.submit
    engine.runner.submit = lambda plan: (steps.append(plan), submit(plan))[1]  # type: ignore[method-assign]
    assert run(engine, requests) == plain
    assert any(plan.drafts for plan in steps)
    assert len(steps) < 6  # tokens of the longest answer


@pytest.mark.parametrize("name", ["experts", *rare("window", "latent")])
def test_in_batch_invariant_mode_company_and_chunking_change_no_bit(name: str) -> None:
    decoder = make_decoder(SPECS[name])
    wanted = (prompt(19, 1), SamplingParams(temperature=0, max_tokens=2, logprobs=0))
    others = [(prompt(2 + 2 * seed, seed), SamplingParams(temperature=1, max_tokens=2)) for seed in (2, 3)]

    def log_probabilities(requests, **options) -> list[float]:
        engine = make_engine(decoder, on_kernels=True, invariant=True, **options)
        for index, (tokens, params) in enumerate(requests):
            engine.add(tokens, params, request_id=str(index))
        found: list[float] = []
        while engine.has_work:
            for done in engine.step().finished:
                if done.request_id == "0":
                    found = [entry.logprob for entry in done.samples[0].logprobs]
        engine.runner.close()
        return found

    alone = log_probabilities([wanted])
    assert len(alone) == 2
    assert log_probabilities([wanted, *others], max_tokens_per_step=16) == alone


class Twins:
    """Plays every plan on both runners. The torch runner's tokens go on; the kernels' are compared steps later,
    so that they always have steps in flight whose tokens the host has not seen."""

    def __init__(self, kernels: CudaRunner, torch_runner: TorchRunner, in_flight: int) -> None:
        self.kernels, self.torch_runner, self.in_flight = kernels, torch_runner, in_flight
        self.pending: deque = deque()
        self.tokens: Iterator[int] = iter(())

    def submit(self, plan: StepPlan):
        expected = self.torch_runner.submit(plan)
        self.pending.append((plan.index, expected.result(), self.kernels.submit(plan)))
        self.tokens = iter(expected.result().tokens)
        while len(self.pending) > self.in_flight:
            self.compare()
        return expected

    def compare(self) -> None:
        index, expected, pending = self.pending.popleft()
        found = pending.result()
        assert (found.tokens, found.errors) == (expected.tokens, expected.errors), f"step {index}"


@pytest.mark.long
def test_random_plans_with_steps_in_flight_give_the_torch_runners_tokens() -> None:
    decoder, slots, size = make_decoder(SPECS["window"]), 5, 16
    caches = [KVCache(decoder.spec, 12, size, torch.float32, DEVICE) for _ in range(2)]
    shared = dict(max_slots=slots, max_context=40, eos_token_ids=(7,), host_blocks=8)
    kernels = CudaRunner(CudaDecoder(decoder, 96, slots), caches[0], **shared)
    twins = Twins(kernels, TorchRunner(decoder, caches[1], **shared), in_flight=3)
    planner = RandomPlanner(
        twins, lambda _: next(twins.tokens), blocks=12, host_blocks=8, block_size=size, slots=slots, longest=26,
        seed=11,
    )  # fmt: skip
    kinds = [
        SamplingParams(temperature=0), SamplingParams(temperature=0.9), SamplingParams(top_k=10, min_p=0.01),
        SamplingParams(temperature=0.8, repetition_penalty=1.3, min_tokens=4),
    ]  # fmt: skip
    for index, params in enumerate(kinds):
        planner.add(
            PlannedSequence(
                prompt(6 + 4 * index, index), 6 + 4 * index, params, index, 0, samples_left=index % 2
            )
        )
    for _ in range(14):
        planner.step()
    while twins.pending:
        twins.compare()
    assert planner.checked > 12
    kernels.close()


def test_a_step_that_cannot_be_captured_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_decoder(SPECS["dense"])
    requests = [(prompt(3, 1), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))]
    expected = run(make_engine(decoder, on_kernels=False, overlap=False), requests)
    engine = make_engine(decoder, on_kernels=True)
    launches = engine.runner.launches
    launches._use_graphs = True
    tried = []

    def fail(shape, launch) -> None:
        tried.append(shape)
        raise torch.OutOfMemoryError("no memory for a graph")

    monkeypatch.setattr(launches.graphs, "capture", fail)
    assert run(engine, requests) == expected
    assert len(tried) == 1  # and is not tried again


@pytest.mark.parametrize("name", list(SPECS))
def test_the_ledger_predicts_what_the_runner_holds_to_the_byte(name: str) -> None:
    runner = make_engine(
        make_decoder(SPECS[name]), on_kernels=True, max_tokens_per_step=40, max_running=7
    ).runner
    held = runner.memory_bytes()
    predicted = {
        "activations": gpu_buffer_bytes(SPECS[name], 40, 7, 4),
        "logits": gpu_logit_bytes(53, 7, 4),
        "token tables": gpu_table_bytes(7, 40, 120, 16),
        "weights": weight_bytes(SPECS[name], "float32"),
    }
    assert predicted == {part: held[part] for part in predicted}


@pytest.mark.parametrize("name", list(SPECS))
def test_the_ledger_counts_eight_bit_weights_as_they_are_held(name: str) -> None:
    model = CudaDecoder(make_decoder(SPECS[name]), 16, 2, weights="fp8")
    predicted = weight_bytes(SPECS[name], "float32") - quantised_saved_bytes(SPECS[name], 4, "fp8")
    assert model.weight_bytes == predicted < weight_bytes(SPECS[name], "float32")
