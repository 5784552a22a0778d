"""`torch.compile(model, backend="cumulo")`: dynamo's graph through AOT autograd, our passes, and one flat function.
PyTorch finds `cumulo` by its entry point; a report is kept for each graph (`recording`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import list_backends, register_backend
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.fx import GraphModule

from cumulo.compile.passes.clean import (
    USER_OUTPUTS,
    common_subexpressions,
    drop_copies,
    fold_constants,
    remove_dead,
)
from cumulo.compile.passes.code import Code, choose_code, kernel_text, launcher_of
from cumulo.compile.passes.facts import Notes, declined, fake
from cumulo.compile.passes.function import order_steps, write_function
from cumulo.compile.passes.groups import FusedGroup, find_groups, pattern_name
from cumulo.compile.passes.linears import FROZEN, join_linears
from cumulo.compile.passes.memory import in_order, peak_bytes, plan_memory
from cumulo.compile.passes.report import (
    GraphReport,
    Kernel,
    count_kernels,
    count_operations,
    draw_graph,
    draw_steps,
    work_of,
)
from cumulo.errors import ConfigError

Pass = Callable[[GraphModule, Notes], GraphModule]
PASSES: tuple[Pass, ...] = (
    fold_constants,
    drop_copies,
    common_subexpressions,
    join_linears,
    remove_dead,
)


@dataclass(frozen=True, slots=True)
class Options:
    """What `torch.compile(..., options={...})` may say."""

    code: Code = (
        "auto"  # what runs groups: triton, inductor, eager; auto: the first of these that is possible here
    )
    freeze: bool = False  # weights never change: passes may keep joined copies of them
    passes: Sequence[Pass] = PASSES  # what rewrites the graph before groups are found


_records: list[list[GraphReport]] = []


@contextmanager
def recording() -> Iterator[list[GraphReport]]:
    """The list takes a report of every graph that is compiled inside."""
    reports: list[GraphReport] = []
    _records.append(reports)
    try:
        yield reports
    finally:
        _records.remove(reports)


def cumulo(
    module: GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend itself: called by torch.compile with a graph of the user's model."""
    if mode not in (None, "default"):
        raise ConfigError(f"mode={mode!r} is Inductor's; backend='cumulo' takes options={{'code': ...}}")
    known = [one.name for one in fields(Options)]
    if unknown := [name for name in options or {} if name not in known]:
        raise ConfigError(f"backend='cumulo' has no option {unknown[0]!r}; it has {', '.join(known)}")
    chosen = Options(**(options or {}))
    device = next((one.device for one in inputs if isinstance(one, torch.Tensor)), torch.device("cpu"))
    code, _ = choose_code(chosen.code, device)
    backend = aot_autograd(
        fw_compiler=partial(compile_graph, options=chosen, stage="forward"),
        bw_compiler=partial(compile_graph, options=chosen, stage="backward"),
        inference_compiler=partial(compile_graph, options=chosen, stage="inference"),
        # What kernels recompute while they read it anyway need not be saved; eager operations would pay for it.
        partition_fn=default_partition if code == "eager" else min_cut_rematerialization_partition,
    )
    compiled: Callable[..., Any] = backend(module, inputs)
    return compiled


def compile_graph(
    module: GraphModule, inputs: Sequence[Any], *, options: Options, stage: str
) -> Callable[..., Any]:
    """AOT's graph to a function that takes the list of its arguments."""
    notes: Notes = []
    context = torch._guards.TracingContext.try_get()
    if stage == "forward" and context is not None and context.fw_metadata is not None:
        module.meta[USER_OUTPUTS] = context.fw_metadata.num_forward_returns
    if stage == "inference" and options.freeze and context is not None and context.fw_metadata is not None:
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        module.meta[FROZEN] = {names[place] for place in context.fw_metadata.static_input_indices}
    before, drawn = count_operations(module.graph), draw_graph(module.graph)
    steps = in_order(module.graph)
    work, peak = work_of(steps), peak_bytes(steps, module.graph)
    for one in options.passes:
        module = one(module, notes)
    groups = find_groups(module, notes)
    launchers: dict[FusedGroup, tuple[str, Callable[..., Any], bool]] = {}
    kernels: dict[str, Kernel] = {}
    for group in groups:
        value = fake(group.outputs[0])
        code, why = choose_code(options.code, value.device)
        if why:
            declined(notes, group.nodes, f"no generated Triton kernel: {why}; {code} computes it")
        if code == "eager":
            continue
        known = kernels.get(group.source.text)
        pattern = pattern_name(group.nodes)
        name = known.name if known else f"kernel_{len(kernels)}_{pattern.translate(_WORDS)}"
        kernels[group.source.text] = Kernel(
            name, pattern, code, kernel_text(group, name), len(group.nodes), (known.times if known else 0) + 1
        )
        launchers[group] = (name, launcher_of(group, code, name), code == "triton")
    steps = order_steps(module, list(launchers))
    plan = plan_memory(peak, steps, module.graph)
    run, text = write_function(module, steps, plan, launchers)
    after = draw_steps(steps)
    report = GraphReport(
        stage, before, count_kernels(steps), work, work_of(steps), tuple(notes), peak,
        plan.peak_after_bytes, plan.reused_bytes, len(plan.in_place), text, tuple(kernels.values()), drawn, after,
    )  # fmt: skip
    for reports in _records:
        reports.append(report)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


_WORDS = str.maketrans({" ": "_", "+": "and", ",": None})

# Where Cumulo is installed, PyTorch knows the name by its entry point, and registers what it loads itself.
if "cumulo" not in list_backends(()):
    register_backend(compiler_fn=cumulo, name="cumulo")
