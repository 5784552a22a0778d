"""Stages of kernels for GPUs that are not here: what is found in them is what was planted, and what Triton and
ptxas say themselves."""

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")

import triton

from cumulo.compile.stages.launch import KernelLaunch, find_launch, recorded
from cumulo.compile.stages.page import owners, stages_page
from cumulo.compile.stages.record import CompileError, StagesRecord, record, record_of_json
from cumulo.compile.stages.verdict import judge
from cumulo.errors import ConfigError
from tests import thorough
from tests.console.browsing import ARGUMENTS, CHROMIUM

NAMES = sorted(recorded())
PLANTED = Path(__file__).with_name("planted.py")


def planted(
    name: str,
    target: str = "sm_90a",
    types: str = "",
    options: dict[str, int] | None = None,
    **constants: int,
) -> StagesRecord:
    pairs = dict(one.split("=") for one in types.split())
    values = {key: str(value) for key, value in constants.items()}
    return record(find_launch(f"{PLANTED}:{name}", pairs, values, options or {}), target)


@pytest.fixture(scope="module")
def softmax() -> StagesRecord:
    return planted("softmax", BLOCK=1024)


def line_of(text: str) -> int:
    return next(at for at, line in enumerate(PLANTED.read_text().splitlines(), 1) if text in line)


def test_an_uncoalesced_load_is_found_in_its_line() -> None:
    found = judge(planted("strided", BLOCK=1024)).findings
    assert (found[0].kind, found[0].line) == ("uncoalesced", line_of("tl.load(x_ptr + at * 16"))
    assert "4 bytes are used" in found[0].text


def test_a_column_of_rows_is_uncoalesced_whatever_the_stride() -> None:
    one = planted("column_of_rows", BLOCK=256)
    for stride in (33, 4096):
        again = judge(
            record_of_json(one.to_json() | {"launch": one.launch.as_json() | {"numbers": {"stride": stride}}})
        )
        assert (again.findings[0].kind, again.findings[0].line) == (
            "uncoalesced",
            line_of("row * stride, mask=row < n"),
        )


def test_bank_conflicts_are_those_that_triton_counts() -> None:
    verdict = judge(planted("conflicts", N=64))
    found = verdict.findings[0]
    assert (found.kind, found.line) == ("bank conflicts", line_of("tile.load(columns)"))
    assert next(row.ways for row in verdict.traffic if row.space == "shared" and not row.is_store) == 32


@pytest.mark.long
def test_registers_and_spills_are_those_of_ptxas(softmax: StagesRecord, tmp_path: Path) -> None:
    one = planted("spills", options={"maxnreg": 64, "num_warps": 4}, BLOCK=8192)
    assert judge(one).findings[0].kind == "spills"
    ptx = one.stage("ptx")
    assert ptx is not None and one.resources.registers == 64
    machine = one.stage("sass")
    assert machine is not None
    stored = re.findall(r"\bSTL(?:\.\d+)?\b", machine.text)
    assert stored and one.resources.spill_store_bytes >= 4 * len(stored) // 2
    # The assembler's own words of the text that is shown.
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    assembler = next(one for one in (folder / "ptxas-blackwell", folder / "ptxas") if one.exists())
    text, source = softmax.stage("ptx"), tmp_path / "k.ptx"
    assert text is not None
    source.write_text(text.text)
    words = [assembler, "-v", "--regAllocOptLevel=2", "--gpu-name=sm_90a", source, "-o", tmp_path / "k.cubin"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    assert f"Used {softmax.resources.registers} registers" in said


def test_a_kernel_without_waste_is_said_to_have_none_and_every_stage_knows_its_lines(
    softmax: StagesRecord,
) -> None:
    one = softmax
    verdict = judge(one)
    assert verdict.findings == [] and "Limited by memory" in verdict.summary
    assert [stage.name for stage in one.stages] == ["python", "ttir", "ttgir", "llir", "ptx", "sass"]
    body = set(range(line_of("row = tl.program_id(0)\n".strip()), line_of("e / tl.sum(e, 0)") + 1))
    for stage in one.stages[1:]:
        known = {line for line in stage.lines if line}
        assert len(known & body) >= 5, stage.name
        assert sum(map(bool, stage.lines)) >= 0.6 * len(stage.lines), stage.name
    loads = [line for text, line in one.stages[4].rows() if "ld.global" in text]
    assert set(loads) == {line_of("tl.load(x_ptr + row * stride + cols")}
    assert {"Inliner", "TritonGPUCoalesce"} <= {change.name for change in one.passes}


@pytest.mark.long
def test_owners_of_elements_are_those_of_a_blocked_layout(softmax: StagesRecord) -> None:
    """size_per_thread 4, 32 lanes, 4 warps: element 4 * (32 * warp + lane) + register."""
    layout = softmax.layouts[0]
    assert layout["shape"] == [1024]
    size = int(re.findall(r"size_per_thread=\[(\d+)", layout["layout"])[0])
    for (element,), (warp, lane, register) in owners(layout).items():
        assert element == size * (32 * warp + lane) + register


@pytest.mark.long
def test_amd_has_stages_registers_and_lines_too() -> None:
    one = planted("softmax", "gfx942", BLOCK=1024)
    assert [stage.name for stage in one.stages] == ["python", "ttir", "ttgir", "llir", "amdgcn"]
    assert one.resources.registers > 0 and one.resources.spill_store_bytes == 0
    assert sum(map(bool, one.stages[-1].lines)) > 100


def test_what_cannot_be_is_refused_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(
        CompileError, match=rf"planted.py, line {line_of('tl.load(x_ptr + other)')}: .*64.*128"
    ):
        planted("wrong", BLOCK=64)
    with pytest.raises(ConfigError, match="the constant BLOCK needs a value: --set BLOCK=VALUE"):
        planted("strided")
    with pytest.raises(ConfigError, match="did you mean sm_90a"):
        planted("strided", "sm_90", BLOCK=64)
    with pytest.raises(ConfigError, match="no Triton kernel softmaxx; did you mean softmax"):
        planted("softmaxx")
    with pytest.raises(ConfigError, match="has no argument m; there are: x_ptr"):
        find_launch(f"{PLANTED}:strided", {"m": "i32"}, {"BLOCK": "64"}, {})
    with pytest.raises(ConfigError, match="rms_norm has 3 kernels; name one: "):
        find_launch("rms_norm", {}, {}, {})
    broken = tmp_path / "broken.py"
    broken.write_text("import triton\n\n@triton.jit\ndef k(:\n")
    with pytest.raises(ConfigError, match=r"broken.py cannot be imported: line 4"):
        find_launch(f"{broken}:k", {}, {}, {})


def test_every_kernel_of_ours_is_known_by_name() -> None:
    import ast

    folder = Path(__file__).parents[3] / "cumulo/kernels/cuda"
    launched: set[str] = set()
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        jits = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
                and any("jit" in ast.unparse(one) for one in node.decorator_list)}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in jits:
                launched.add(f"{path.stem}:{node.value.id}")
    known = {one.kernel.rpartition(".")[2] for one in recorded().values()}
    assert launched and not launched - known


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*NAMES[::9], *thorough.rare(*(one for at, one in enumerate(NAMES) if at % 9))]
)
def test_stages_of_every_kernel_of_ours(name: str) -> None:
    launch: KernelLaunch = recorded()[name]
    one = record(launch, "sm_90a")
    assert one.resources.registers > 0
    assert all(any(stage.lines) for stage in one.stages)
    assert len(stages_page(one, judge(one))) > 10_000


@pytest.mark.long
def test_the_page_opens_in_a_browser_and_a_click_shows_what_a_line_becomes(tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("not installed: a Chromium browser")
    playwright = pytest.importorskip("playwright.sync_api")
    one = planted("conflicts", N=64)
    page_file = tmp_path / "page.html"
    page_file.write_text(stages_page(one, judge(one)))
    line = line_of("tile.load(columns)")
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        for width in (1440, 390):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(page_file.as_uri())
            page.click("a.line")
            shown = page.locator(f"#stage-sass span.on[data-line='{line}']")
            assert shown.count() > 0 and "LDS" in "".join(shown.all_inner_texts())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
