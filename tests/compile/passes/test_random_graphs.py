"""A compiled program never differs from eager PyTorch: values, types, gradients, written inputs, shared memory."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from cumulo.compile.passes import compiler
from tests.compile.passes.random_graphs import Program, programs, results, shared_memory

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float64: 2e-4}


def check(program: Program, dynamic: bool | None = None, **options: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(program.__call__, backend=compiler.cumulo, dynamic=dynamic, options=options)
    for grow in (0, 2) if dynamic else (0,):
        try:
            expected = results(program, program.arguments(grow))
        except RuntimeError:
            return  # a gradient that eager PyTorch refuses
        found = results(compiled, program.arguments(grow))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            scale = TOLERANCE.get(torch.bfloat16 if program.is_rounded else one.dtype, 0)
            scale = scale if one.dtype.is_floating_point else 0
            torch.testing.assert_close(one, other, rtol=scale, atol=scale, equal_nan=True)
        assert shared_memory(found) == shared_memory(expected)


quiet = settings(suppress_health_check=list(HealthCheck))


@settings(quiet, max_examples=12)
@given(program=programs())
def test_random_programs_equal_eager_pytorch(program: Program) -> None:
    check(program)


@pytest.mark.long
@settings(quiet, max_examples=200)
@given(program=programs())
def test_two_hundred_random_programs_equal_eager_pytorch(program: Program) -> None:
    check(program)


@pytest.mark.long
@settings(quiet, max_examples=60)
@given(program=programs())
def test_random_programs_of_dynamic_shapes_equal_eager_pytorch(program: Program) -> None:
    check(program, dynamic=True)
