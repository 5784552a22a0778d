"""The page of `cumulo compile stages`: stages side by side, linked by source line, and what was found in them. Also
the difference of two records, stage by stage.
"""

import difflib
from collections.abc import Iterator
from html import escape
from typing import Any

from cumulo.base import svg
from cumulo.base.page import html_table, page
from cumulo.compile.stages.record import TITLES, StagesRecord, StageText
from cumulo.compile.stages.verdict import KernelVerdict

_STYLE = """
main{max-width:none}pre{margin:0;font:12px/1.45 ui-monospace,SFMono-Regular,Menlo,monospace;tab-size:4}
.panes{display:flex;gap:10px;overflow-x:auto;align-items:stretch;height:72vh}
.pane{flex:1 0 340px;background:var(--card);border:1px solid var(--edge);border-radius:8px;display:flex;
flex-direction:column;min-width:0}.pane h3{padding:8px 12px;margin:0;border-bottom:1px solid var(--edge)}
.pane .text{overflow:auto;flex:1;padding:6px 0}.pane[hidden]{display:none}
.text span{display:block;padding:0 12px;white-space:pre;min-width:max-content}
.text span[data-line]{cursor:pointer}.text span[data-line]:hover{background:var(--edge)}
.text span.on{background:color-mix(in srgb,var(--s0) 28%,transparent)}
.text span.found{box-shadow:inset 4px 0 var(--bad)}
.choose{display:flex;flex-wrap:wrap;gap:6px 14px;margin:10px 0}.choose label{cursor:pointer}
.less{color:var(--bad)}.more{color:var(--good)}.card pre{overflow-x:auto}
.layouts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(360px,100%),1fr));gap:14px}
a.line{color:var(--s0);cursor:pointer;text-decoration:underline}
@media (max-width:700px){.pane{flex-basis:86vw}}
"""
_SCRIPT = """
const panes=document.querySelectorAll('.pane');
function show(line){document.querySelectorAll('.text span.on').forEach(s=>s.classList.remove('on'));
panes.forEach(p=>{const all=p.querySelectorAll(`span[data-line="${line}"]`);
all.forEach(s=>s.classList.add('on'));
if(all[0]){const t=p.querySelector('.text');t.scrollTop=all[0].offsetTop-t.offsetTop-t.clientHeight/3}})}
document.addEventListener('click',e=>{const s=e.target.closest('[data-line]');if(s)show(s.dataset.line)});
document.querySelectorAll('.choose input').forEach(box=>box.addEventListener('change',()=>{
document.getElementById(box.value).hidden=!box.checked}));
"""
_CELL, _MOST_CELLS = 22, 16


def stages_page(one: StagesRecord, verdict: KernelVerdict, other: StagesRecord | None = None) -> str:
    resources, parts = one.resources, [f"<p>{escape(verdict.summary)}</p>"]
    matrix = ", ".join(f"{count} × {name}" for name, count in verdict.matrix_instructions.items()) or "none"
    tiles = {
        "registers per thread": str(resources.registers),
        "bytes of spills": str(resources.spill_store_bytes + resources.spill_load_bytes),
        "bytes of shared memory": f"{resources.shared_bytes:,}",
        "warps per block": str(resources.warps),
        "matrix instructions": matrix,
    }
    if verdict.occupancy is not None:
        tiles[f"occupancy, limited by {verdict.occupancy.limit}"] = f"{verdict.occupancy.share:.0%}"
    parts.append(
        '<div class="tiles">' + "".join(_tile(name, value) for name, value in tiles.items()) + "</div>"
    )
    if one.launch.guessed:
        guess = ", ".join(f"{name}: {one.launch.signature[name]}" for name in one.launch.guessed)
        parts.append(
            f'<p class="soft">Types that nobody gave were guessed: {escape(guess)}. --arg changes one.</p>'
        )
    if verdict.findings:
        parts.append("<h2>What costs time</h2>")
        parts.append('<div class="card"><ul>' + "".join(map(_finding, verdict.findings)) + "</ul></div>")
    parts += ["<h2>Stages</h2>", '<p class="soft">A click on a line shows what it becomes.</p>']
    parts += [_chooser(one.stages), _panes(one.stages, {finding.line for finding in verdict.findings})]
    if other is not None:
        parts += ["<h2>Differences</h2>", *_differences(other, one)]
    parts += ["<h2>What each pass changed</h2>", *map(_change, one.passes)]
    if verdict.traffic:
        parts += ["<h2>Memory accesses of one block</h2>", _accesses(verdict)]
    if one.layouts:
        parts += ["<h2>Which thread holds which element</h2>", '<div class="layouts">']
        parts += [*map(_layout, one.layouts), "</div>"]
    title = f"{one.launch.name} for {one.target}, Triton {one.triton}"
    return page(title, *parts, f"<script>{_SCRIPT}</script>", style=_STYLE)


def _tile(name: str, value: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def _finding(finding: Any) -> str:
    where = f'<a class="line" data-line="{finding.line}">line {finding.line}</a>: ' if finding.line else ""
    return f"<li>{where}{escape(finding.text)}</li>"


def _chooser(stages: list[StageText]) -> str:
    shut = _shut(stages)
    boxes = (
        f'<label><input type="checkbox" value="stage-{one.name}"{"" if index in shut else " checked"}> '
        f"{TITLES[one.name]}</label>"
        for index, one in enumerate(stages)
    )
    return '<div class="choose">' + "".join(boxes) + "</div>"


def _shut(stages: list[StageText]) -> set[int]:
    """LLVM IR is long and says little that PTX does not."""
    return {index for index, one in enumerate(stages) if one.name in ("llir", "ttir")}


def _panes(stages: list[StageText], found: set[int]) -> str:
    shut = _shut(stages)
    return '<div class="panes">' + "".join(
        f'<div class="pane" id="stage-{one.name}"{" hidden" if index in shut else ""}><h3>{TITLES[one.name]}</h3>'
        f'<div class="text"><pre>{"".join(_lines(one, found if one.name == "python" else set()))}</pre></div></div>'
        for index, one in enumerate(stages)
    ) + "</div>"  # fmt: skip


def _lines(stage: StageText, found: set[int]) -> Iterator[str]:
    for text, line in stage.rows():
        shown = f"{line:>4}  {text}" if stage.name == "python" else text
        link = f' data-line="{line}"' if line else ""
        kind = ' class="found"' if line and line in found else ""
        yield f"<span{link}{kind}>{escape(shown) or ' '}</span>"


def _change(change: Any) -> str:
    head = f"{escape(change.name)} <span class='soft'>({TITLES.get(change.stage, change.stage)})</span> "
    head += f'<span class="less">−{change.removed}</span> <span class="more">+{change.added}</span>'
    return f'<details><summary>{head}</summary><div class="card">{_diff(change.diff)}</div></details>'


def _diff(text: str) -> str:
    kinds = {"-": "less", "+": "more"}
    lines = (
        f'<span class="{kinds.get(line[:1], "soft")}">{escape(line)}</span>\n' for line in text.splitlines()
    )
    return f"<pre>{''.join(lines)}</pre>"


def _accesses(verdict: KernelVerdict) -> str:
    headings = (
        "line",
        "what",
        "instructions",
        "sectors asked for",
        "sectors moved",
        "bytes used",
        "used share",
    )
    rows = []
    for row in verdict.traffic:
        what = f"{row.space} {'store' if row.is_store else 'load'}"
        if row.space == "shared":
            conflict = "no bank conflict" if row.ways == 1 else f"{row.ways}-way bank conflict"
            cells = [conflict, "", "", ""]
        elif not row.judged:
            cells = ["depends on loaded data", "", "", ""]
        else:
            numbers = (row.requested_sectors, row.touched_sectors, row.used_bytes)
            cells = [*(f"{number:,}" for number in numbers), f"{row.efficiency:.0%}"]
        rows.append([str(row.line), what, f"{row.count} × {row.instruction}", *cells])
    return html_table(headings, rows)


def _layout(layout: dict[str, Any]) -> str:
    """The first elements of a tile, each with its thread; a colour for each warp."""
    shape = layout["shape"]
    owner = owners(layout)
    rows = 1 if len(shape) == 1 else min(shape[-2], _MOST_CELLS)
    columns = min(shape[-1], _MOST_CELLS)
    lead = (0,) * max(0, len(shape) - 2)
    cells = []
    for row in range(rows):
        for column in range(columns):
            at = (*lead, row, column) if len(shape) > 1 else (column,)
            warp, lane, register = owner.get(at, (0, 0, 0))
            x, y = column * _CELL * 1.5, row * _CELL
            tip = svg.title(f"element {at}: warp {warp}, lane {lane}, register {register}")
            color = f"hsl({(warp * 67 + 210) % 360} 65% {82 - register % 4 * 7}%)"
            box = svg.tag("rect", tip, x=x, y=y, width=_CELL * 1.5 - 1, height=_CELL - 1, fill=color)
            cells.append(
                box + svg.text(x + _CELL * 0.75, y + _CELL * 0.7, str(lane), "middle", style="fill:#111")
            )
    drawn = svg.picture(columns * _CELL * 1.5, rows * _CELL, *cells, label=f"threads of {layout['layout']}")
    of = " × ".join(map(str, shape))
    told = f"<h3>{escape(layout['used_by'])}, tile of {of}</h3><p class='soft'>{escape(layout['layout'])}</p>"
    key = "<p class='soft'>A number is a lane, a colour a warp; darker is a later register.</p>"
    return f'<div class="card">{told}{drawn}{key}</div>'


def owners(layout: dict[str, Any]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Which warp, lane and register hold each of a tile's first elements: their bits' places are combined by
    exclusive or (linear layouts)."""
    near: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,) * len(layout["shape"]), (0, 0, 0))]
    for kind, name in enumerate(("warp", "lane", "register")):
        for bit, basis in enumerate(layout[name]):
            # A bit that leads out of the picture leads all out of it that have it: places grow by powers of two.
            if any(basis) and max(basis) < _MOST_CELLS:
                near += [
                    (
                        tuple(left ^ right for left, right in zip(at, basis, strict=True)),
                        (*held[:kind], held[kind] | 1 << bit, *held[kind + 1 :]),
                    )
                    for at, held in near
                ]
    return dict(reversed(near))


def differences(before: StagesRecord, after: StagesRecord) -> list[tuple[str, str, str]]:
    """What of the summary numbers differs: name, before, after."""
    rows = [("Triton", before.triton, after.triton), ("target", before.target, after.target)]
    for name in type(before.resources).__slots__:
        old, new = (str(getattr(one.resources, name)) for one in (before, after))
        rows.append((name.replace("_", " "), old, new))
    for stage in after.stages:
        if (other := before.stage(stage.name)) is not None:
            old, new = (str(len(one.lines)) for one in (other, stage))
            rows.append((f"lines of {TITLES[stage.name]}", old, new))
    return [row for row in rows if row[1] != row[2]]


def _differences(before: StagesRecord, after: StagesRecord) -> Iterator[str]:
    rows = differences(before, after)
    yield html_table(("", "before", "after"), rows) if rows else "<p>All numbers are equal.</p>"
    for stage in after.stages:
        if (other := before.stage(stage.name)) is not None and other.text != stage.text:
            lines = difflib.unified_diff(other.text.splitlines(), stage.text.splitlines(), lineterm="", n=2)
            text = "\n".join(list(lines)[2:])
            yield f'<details><summary>{TITLES[stage.name]}</summary><div class="card">{_diff(text)}</div></details>'
