"""Warming up: every size a step may have is met, and playing empty steps leaves nothing behind."""

import random

import pytest
import torch

from tests.engine.tiny_cuda_engine import SPECS, make_decoder, make_engine, use_few_programs  # isort: skip
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.play import runner_cuda
from cumulo.engine.play.cuda.step_words import StepShape, shape_of, warm_shapes
from cumulo.engine.play.runner_cuda import CudaRunner

pytestmark = pytest.mark.long


def test_every_size_of_a_step_is_among_the_warmed_shapes() -> None:
    draw = random.Random(1)
    for most in (StepShape(8192, 256, 256), StepShape(2048, 16, 96), StepShape(300, 40, 40)):
        warmed = warm_shapes(most, adapters=False)
        assert all(s.tokens <= most.tokens and s.rows <= most.rows and s.draws <= most.draws for s in warmed)
        tokens = {(shape.tokens, shape.decodes_only) for shape in warmed}
        rows = {(shape.rows, shape.decodes_only) for shape in warmed}
        draws = {(shape.draws, shape.cuts) for shape in warmed if not shape.decodes_only}
        for _ in range(500):
            count = draw.randint(1, most.rows)
            total = draw.choice((count, draw.randint(count, most.tokens)))
            shape = shape_of(total, count, draw.randint(0, count), most, cuts=draw.random() < 0.5)
            assert (shape.tokens, shape.decodes_only) in tokens
            assert (shape.rows, shape.decodes_only) in rows
            assert shape.draws == 0 or shape.decodes_only or (shape.draws, shape.cuts) in draws


def test_a_warmed_runner_makes_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    decoder = make_decoder(SPECS["latent experts"])
    made = []
    for warm in (False, True):
        engine = make_engine(decoder, on_kernels=True, blocks=8, max_running=2, max_context=32)
        assert isinstance(engine.runner, CudaRunner)
        if warm:
            told: list[str] = []
            before = engine.runner.cache.key_storage.nan_to_num(7)
            some = [shape for shape in warm_shapes(engine.runner._most, False) if shape.tokens <= 8][::3]
            with monkeypatch.context() as patched:
                patched.setattr(runner_cuda, "warm_shapes", lambda *_, few=some: few)
                engine.runner.warm_up(told.append)
            assert told and torch.equal(before, engine.runner.cache.key_storage.nan_to_num(7))
        engine.add(list(range(8, 20)), SamplingParams(temperature=0.7, seed=3, max_tokens=3, ignore_eos=True))
        finished = []
        while engine.has_work:
            finished += engine.step().finished
        made.append([sample.token_ids for done in finished for sample in done.samples])
        engine.runner.close()
    assert made[0] == made[1]
