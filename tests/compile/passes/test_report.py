"""What the report of a compiled model says: reasons with the user's line, breaks, recompiles, bad input."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cumulo.compile.passes import compiler
from cumulo.compile.passes.facts import Fused, Notes
from cumulo.compile.passes.model import compile_model
from cumulo.compile.passes.page import report_page
from cumulo.errors import ConfigError

HERE = Path(__file__).name


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(x @ gate) * (x @ up)


def breaks(x: Tensor) -> Tensor:
    x = x.sin() * 2
    print(end="")  # dynamo cannot trace it
    if x.sum() > 1000:
        return x
    return x.cos() + 1


@torch.library.custom_op("cumulo_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def with_custom_operation(x: Tensor) -> Tensor:
    return twice(x.sin() + 1).cos() * 3


def test_the_report_counts_operations_kernels_and_traffic() -> None:
    report = compile_model(swiglu, [(torch.randn(6, 8), torch.randn(8, 32), torch.randn(8, 32))])
    (graph,) = report.graphs
    assert (graph.operations_before, graph.kernels_after) == (4, 3)
    # silu's result is neither written nor read: 2 * 6 * 32 numbers of 4 bytes.
    assert graph.before.traffic_bytes - graph.after.traffic_bytes == 2 * 6 * 32 * 4
    assert [row[0] for row in graph.patterns()] == ["SwiGLU"]
    assert "inference: 4 operations became 3 kernels; 1.5 KiB less traffic" in report.to_text()
    assert report.difference < 1e-5
    assert any("mm is a library's kernel" in why for why, _, _ in graph.reasons())
    assert any(HERE in line for _, _, line in graph.reasons())


def test_the_page_has_both_pictures_and_the_kernels() -> None:
    report = compile_model(swiglu, [(torch.randn(6, 8), torch.randn(8, 32), torch.randn(8, 32))])
    text = report_page(report)
    assert text.count("<svg") == 2 and "tl.sigmoid" in text and "These could not fuse" in text


def test_graph_breaks_are_named_with_the_line_of_the_user() -> None:
    report = compile_model(breaks, [(torch.randn(5, 7),)])
    assert report.difference < 1e-5
    assert any(HERE in one.line and "sum()" in one.code for one in report.breaks)


def test_a_recompile_names_the_guard_that_failed() -> None:
    report = compile_model(
        swiglu, [tuple(torch.randn(a, b) for a, b in ((n, 8), (8, 32), (8, 32))) for n in (3, 5)]
    )
    assert len(report.graphs) == 2 and report.difference < 1e-5
    assert any("size" in why for why in report.recompiles)
    assert any("known only at run time" in why for why, _, _ in report.graphs[1].reasons())


def test_a_custom_operation_works_and_stays_an_operation_of_its_own() -> None:
    report = compile_model(with_custom_operation, [(torch.randn(5, 7),)])
    (graph,) = report.graphs
    assert report.difference < 1e-5
    assert any("twice" in why and HERE in line for why, _, line in graph.reasons())


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(16, size, bias=False) for size in (16, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        return torch.nn.functional.scaled_dot_product_attention(query.sin(), key, value, enable_gqa=True) + 1


@pytest.mark.parametrize("freeze", [False, True])
def test_three_linears_of_one_input_become_one_where_weights_are_frozen(freeze: bool) -> None:
    report = compile_model(Attention(), [(torch.randn(2, 6, 16),)], freeze=freeze)
    (graph,) = report.graphs
    assert report.difference < 1e-5
    assert graph.function.count("aten_mm_default(") == (1 if freeze else 3)
    joined = any(name == "linears of one input" for name, *_ in graph.patterns())
    refused = any(
        "products of one input needs options={'freeze': True}" in why for why, _, _ in graph.reasons()
    )
    assert (joined, refused) == (freeze, not freeze)


def test_a_pass_of_the_readers_own_replaces_additions_by_a_custom_operation() -> None:
    @torch.library.custom_op("cumulo_tests::add", mutates_args=())
    def add(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    add.register_fake(lambda a, b: torch.empty_like(a))

    def use_mine(module: torch.fx.GraphModule, notes: Notes) -> torch.fx.GraphModule:
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
            node.target = torch.ops.cumulo_tests.add.default
            notes.append(Fused("add of mine", (node.name,), 0))
        return module

    a, b = torch.randn(3, 4), torch.randn(3, 4)
    torch._dynamo.reset()
    with compiler.recording() as graphs:
        compiled = torch.compile(
            lambda a, b: a + b, backend="cumulo", options={"passes": (*compiler.PASSES, use_mine)}
        )
        torch.testing.assert_close(compiled(a, b), a + b)
    assert ("add of mine", 1, 1, 0) in graphs[0].patterns()
    assert "cumulo_tests_add" in graphs[0].function


def test_an_unknown_option_is_refused_with_those_there_are() -> None:
    with pytest.raises(Exception, match=r"has no option 'fast'; it has code, freeze, passes"):
        torch.compile(lambda x: x + 1, backend="cumulo", options={"fast": True})(torch.ones(3))


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def f(x): return x\n", "f", "add a function example_inputs"),
        ("def f(x): return x\n", "g", "has no 'g'"),
        ("import torch\n\nraise ValueError('no')\n", "f", "line 3: ValueError: no"),
        ("def f(x:\n", "f", "line 1: SyntaxError"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason_and_the_line(
    tmp_path: Path, text: str, name: str, message: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        compile_model(f"{path}:{name}")
