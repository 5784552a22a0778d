"""The GPU's runner and decoder, played by Triton's interpreter on a tiny model: the same tokens as the torch
runner's.

With a GPU the same tests run on it, captured graphs included.
"""

import os
from importlib.util import find_spec

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from cumulo.engine.engine import Engine  # noqa: E402
from cumulo.engine.params import SamplingParams  # noqa: E402
from cumulo.engine.runner_cuda import CudaRunner  # noqa: E402
from cumulo.engine.runner_torch import TorchRunner  # noqa: E402
from cumulo.engine.scheduler import Scheduler  # noqa: E402
from cumulo.engine.scheduler_config import SchedulerConfig  # noqa: E402
from cumulo.models.batch import KVCache  # noqa: E402
from cumulo.models.cuda_decoder import CudaDecoder  # noqa: E402
from cumulo.models.decoder import Decoder  # noqa: E402
from cumulo.spec.model import ModelSpec, MoESpec  # noqa: E402

pytestmark = pytest.mark.slow
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BASE = dict(
    family="tiny", vocab_size=53, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_hidden=48,
    max_context=128, eos_token_ids=(7,),
)  # fmt: skip
SPECS = {
    "dense": ModelSpec(**BASE),
    "window": ModelSpec(**BASE, sliding_window=9, qk_norm=True, tied_embeddings=True, qkv_bias=True),
    "experts": ModelSpec(**BASE, moe=MoESpec(experts=4, experts_per_token=2, expert_hidden=16)),
}


def make_decoder(name: str) -> Decoder:
    decoder = Decoder(SPECS[name], torch.float32)
    generator = torch.Generator().manual_seed(3)
    for parameter in decoder.parameters():
        wide = parameter.dim() > 1
        random = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.3 * random if wide else 1 + 0.3 * random
    return decoder.to(DEVICE)


def make_engine(
    decoder: Decoder, on_kernels: bool, overlap: bool = True, invariant: bool = False, **options
) -> Engine:
    defaults = dict(blocks=24, block_size=16, max_context=120, max_running=6, max_tokens_per_step=48)
    config = SchedulerConfig(**{**defaults, **options})
    cache = KVCache(decoder.spec, config.blocks, config.block_size, torch.float32, DEVICE)
    cache.key_storage.fill_(1e3)  # whatever a block held before must not matter
    cache.value_storage.fill_(-1e3)
    shared = dict(
        max_slots=config.max_running,
        max_context=config.max_context,
        eos_token_ids=(7,),
        host_blocks=config.host_blocks,
    )
    if on_kernels:
        model = CudaDecoder(
            decoder, config.max_tokens_per_step, config.max_running, batch_invariant=invariant
        )
        runner = CudaRunner(model, cache, batch_invariant=invariant, **shared)
    else:
        runner = TorchRunner(decoder, cache, **shared)
    return Engine(Scheduler(config), runner, None, vocab_size=53, eos_ids=(7,), overlap=overlap)


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> dict[str, list[list[int]]]:
    for index, (prompt, params) in enumerate(requests):
        engine.add(prompt, params, request_id=str(index))
    outputs: dict[str, list[list[int]]] = {}
    while engine.has_work:
        for done in engine.step().finished:
            assert done.error is None, done.error
            outputs[done.request_id] = [sample.token_ids for sample in done.samples]
    engine.runner.close()
    return outputs


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(8, 53, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", list(SPECS))
def test_the_kernels_give_the_tokens_of_the_torch_runner(name: str) -> None:
    decoder = make_decoder(name)
    requests = [
        (prompt(20, 1), SamplingParams(temperature=0, max_tokens=6)),
        (prompt(3, 2), SamplingParams(temperature=0.8, seed=5, max_tokens=6)),
        (
            prompt(40, 3),
            SamplingParams(temperature=0.7, top_p=0.8, top_k=9, seed=6, max_tokens=5, logprobs=2),
        ),
        (
            [*prompt(20, 1), 9],
            SamplingParams(temperature=0, repetition_penalty=1.4, min_tokens=3, max_tokens=5),
        ),
        (prompt(5, 4), SamplingParams(temperature=1, n=2, seed=8, max_tokens=4, ignore_eos=True)),
    ]
    expected = run(make_engine(decoder, on_kernels=False, overlap=False), requests)
    assert run(make_engine(decoder, on_kernels=True), requests) == expected


def test_draws_with_cuts_are_the_torch_runners_and_need_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_decoder("dense")
    requests = [
        (prompt(3, 1), SamplingParams(temperature=0.9, top_k=9, top_p=0.8, seed=1, max_tokens=2)),
        (prompt(2, 2), SamplingParams(temperature=1, seed=3, max_tokens=2)),
    ]
    expected = run(make_engine(decoder, on_kernels=False, overlap=False), requests)
    monkeypatch.delattr(CudaRunner, "_draw_on_host")
    assert run(make_engine(decoder, on_kernels=True), requests) == expected


def test_preemption_by_recomputation_and_by_swap_changes_no_token() -> None:
    decoder = make_decoder("dense")
    requests = [
        (prompt(18, seed), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)) for seed in range(4)
    ]
    expected = run(make_engine(decoder, on_kernels=False, overlap=False), requests)
    small = dict(blocks=7, max_running=4)
    assert run(make_engine(decoder, on_kernels=True, preemption="recompute", **small), requests) == expected
    swapping = make_engine(decoder, on_kernels=True, preemption="swap", host_blocks=12, **small)
    assert run(swapping, requests) == expected


def test_embeddings_and_prompt_log_probabilities_are_the_torch_runners() -> None:
    decoder = make_decoder("dense")
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


@pytest.mark.parametrize("name", ["window", "experts"])
def test_in_batch_invariant_mode_company_and_chunking_change_no_bit(name: str) -> None:
    decoder = make_decoder(name)
    wanted = (prompt(33, 1), SamplingParams(temperature=0, max_tokens=4, logprobs=0))
    others = [(prompt(17 + 5 * seed, seed), SamplingParams(temperature=1, max_tokens=5)) for seed in (2, 3)]

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
    assert len(alone) == 4
    assert log_probabilities([wanted, *others], max_tokens_per_step=16) == alone
