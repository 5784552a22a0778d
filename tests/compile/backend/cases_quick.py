"""What every run of the tests checks: a kernel runs, and what cannot run says why. Played by test_backend.py."""

import os
import sys

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from cumulo.compile.backend.build import CompilerMissing
from cumulo.compile.backend.ttir import KernelRefused
from cumulo.errors import CumuloError


@triton.jit
def _softmax(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row + at, mask=at < columns, other=-float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(out + row + at, e / tl.sum(e, 0), mask=at < columns)


def case_a_kernel_runs_and_keeps_its_stages():
    assert driver.active.get_current_target().backend == "cumulo"
    x, out = torch.randn(7, 100), torch.empty(7, 100)
    kernel = _softmax[(7,)](x, out, 100, BLOCK=128)
    torch.testing.assert_close(out, x.softmax(-1))
    assert {"ttir", "cpp", "so"} <= set(kernel.asm)
    assert "exp_of(" in kernel.asm["cpp"]


@triton.jit
def _assembly(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    w = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], tl.int32, True, 1)
    tl.store(x + at, w)


def case_an_unsupported_operation_is_refused_by_name_and_line():
    with pytest.raises(KernelRefused, match=r"tt.elementwise_inline_asm at cases_quick.py:\d+"):
        _assembly[(1,)](torch.zeros(16, dtype=torch.int32), BLOCK=16)


@triton.jit
def _wrong(x):
    tl.store(x, undefined_name)  # noqa: F821


def case_a_kernel_that_does_not_compile_shows_its_line():
    with pytest.raises(triton.CompilationError, match="undefined_name"):
        _wrong[(1,)](torch.zeros(1))


@triton.jit
def _plain(x, NUMBER: tl.constexpr):
    tl.store(x, NUMBER)


def case_a_missing_compiler_is_named_with_what_to_install():
    path, os.environ["PATH"] = os.environ["PATH"], ""
    try:
        with pytest.raises(CompilerMissing, match="apt install g"):
            _plain[(1,)](torch.zeros(1), NUMBER=os.getpid())  # not in the cache
    finally:
        os.environ["PATH"] = path


@triton.jit
def _checked(x):
    tl.device_assert(tl.load(x) > 0, "it must be positive")


def case_a_failed_assertion_is_an_error_of_the_launch():
    _checked[(1,)](torch.ones(1), debug=True)
    with pytest.raises(CumuloError, match=r"it must be positive \(cases_quick.py:\d+\)"):
        _checked[(1,)](torch.zeros(1), debug=True)


def case_a_tensor_that_is_not_on_the_cpu_is_refused():
    with pytest.raises(CumuloError, match="'meta'"):
        _softmax[(7,)](torch.empty(7, 100, device="meta"), torch.empty(7, 100), 100, BLOCK=128)


def case_importing_triton_imports_no_torch_for_our_sake():
    import subprocess

    code = "import triton.backends, sys; print('torch' in sys.modules, 'cumulo' in triton.backends.backends)"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert said[1] == "True"
    assert not any(name.startswith("cumulo.kernels.cuda") for name in sys.modules)
