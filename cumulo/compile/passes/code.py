"""What runs a group: generated Triton where Triton has a device for it, else Inductor, else eager PyTorch, each
with the reason. The compiler asks once per graph; equal kernels of a graph, and of other graphs, are made once.
"""

import importlib.util
import linecache
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import torch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from cumulo.compile.passes.facts import tensor
from cumulo.compile.passes.groups import FusedGroup
from cumulo.errors import ConfigError

Code = Literal["auto", "triton", "inductor", "eager"]
Launcher = Callable[..., Any]
_compiled: dict[Any, Launcher] = {}


def choose_code(wanted: Code, device: torch.device) -> tuple[Code, str]:
    """What runs groups on this device, and why it is not Triton."""
    if wanted not in ("auto", "triton", "inductor", "eager"):
        raise ConfigError(f"code is auto, triton, inductor or eager, not {wanted!r}")
    if wanted in ("inductor", "eager"):
        return wanted, f"{wanted} was asked for"
    why = _no_triton(device.type)
    if not why:
        return "triton", ""
    if wanted == "triton":
        raise ConfigError(
            f"code='triton' on {device}: {why}; leave it out, or say code='inductor' or code='eager'"
        )
    if device.type == "cpu" and not _has_compiler():
        return "eager", f"{why}, and Inductor finds no C++ compiler"
    return "inductor", why


@cache
def _no_triton(device: str) -> str:
    """Why Triton cannot run a kernel on tensors of this device; empty where it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device not in ("cpu", "cuda"):
        return f"Triton has no back end for {device}"
    if device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    import triton

    try:
        target = triton.runtime.driver.active.get_current_target()
    except Exception as error:
        return f"Triton has no back end for the CPU here ({str(error).splitlines()[0]})"
    return (
        ""
        if "cpu" in (target.backend, target.arch)
        else f"Triton's back end here is {target.backend}, not the CPU's"
    )


@cache
def _has_compiler() -> bool:
    from shutil import which

    return any(which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def launcher_of(group: FusedGroup, code: Code, name: str) -> Launcher:
    """What runs the group: takes inputs and outputs (Triton), or a list of inputs and gives outputs (Inductor)."""
    metas = tuple(
        (value.dtype, value.device, tuple(value.shape), tuple(value.stride()))
        for node in (*group.source.inputs, *group.outputs)
        if (value := tensor(node)) is not None
    )
    key = (code, group.source.text, metas)
    if key not in _compiled:
        _compiled[key] = _triton(group, name) if code == "triton" else _inductor(group)
    return _compiled[key]


def kernel_text(group: FusedGroup, name: str) -> str:
    return group.source.text.replace("KERNEL", name, 1)


def _triton(group: FusedGroup, name: str) -> Launcher:
    import triton
    import triton.language as tl

    text, file = kernel_text(group, name), f"<cumulo {name} {len(_compiled)}>"
    # Triton reads a kernel's source through `inspect`, which looks here for code that is in no file.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "cumulo.compile.generated"}
    exec(compile(text, file, "exec"), names)
    kernel, grid, warps = names[name], (group.source.programs,), group.source.warps
    bound = kernel[grid]
    quick: Launcher | None = None

    def launch(*tensors: torch.Tensor) -> None:
        """Triton looks at every argument of every call: whether a tensor begins at a multiple of 16 bytes decides
        which code runs. Here all else is known, so that code is called where all tensors do."""
        nonlocal quick
        if any(one.data_ptr() % 16 for one in tensors):
            bound(*tensors, num_warps=warps)
        elif quick is not None:
            quick(*tensors)
        else:
            compiled = bound(*tensors, num_warps=warps)
            quick = compiled[(*grid, 1, 1)] if compiled is not None else partial(bound, num_warps=warps)

    return launch


def _inductor(group: FusedGroup) -> Launcher:
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    inputs = [node.meta["val"] for node in group.source.inputs]
    fakes = detect_fake_mode(inputs)
    assert fakes is not None
    with fakes:
        module = make_fx(as_module(group), decomposition_table=select_decomp_table())(*inputs)
    # Inductor writes down its outputs' strides in the context, which belongs to the whole graph.
    with tracing(TracingContext(fakes)):
        return compile_fx_inner(module, inputs)


def as_module(group: FusedGroup) -> GraphModule:
    """The group as a graph of its own, with the views and constants it looks through."""
    graph, copies = Graph(), {}
    for node in group.source.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def copy(node: Node) -> Node:
        if node not in copies:
            for one in node.all_input_nodes:
                copy(one)
            copies[node] = graph.node_copy(node, lambda one: copies[one])
        return copies[node]

    graph.output(tuple(copy(node) for node in group.outputs))
    return GraphModule(torch.nn.Module(), graph)
