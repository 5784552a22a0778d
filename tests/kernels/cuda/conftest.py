"""Triton's kernels without a GPU: the interpreter plays them on CPU tensors. It must be asked for before any
kernel is defined, so this file does it first of all.

The interpreter's bfloat16 is silently wrong, so tests there use float16 and float32, and each program costs
milliseconds, so their grids are small.
"""

import os
from importlib.util import find_spec

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

# Without Triton there is nothing to test; the package itself is an option.
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")
