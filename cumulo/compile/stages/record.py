"""Stages of one kernel as data: every text from its source to machine code, which source line each text line comes
from, what each pass changed, and what the assembler said of registers. `record` makes it for a target that need not
be here; `cumulo compile stages` shows it, keeps it as JSON and compares two.
"""

import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.compile.stages.launch import KernelLaunch, launch_of_json
from cumulo.compile.stages.lines import source_lines
from cumulo.errors import ConfigError, CumuloError

# What a target is called, and Triton's words for it: back end, architecture, threads of a warp.
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90a": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
TITLES = {
    "python": "Python",
    "ttir": "TTIR",
    "glir": "Gluon IR",
    "ttgir": "TTGIR",
    "llir": "LLVM IR",
    "ptx": "PTX",
    "sass": "SASS",
    "amdgcn": "AMD GCN",
}
_MOST_DIFF = 300  # lines of one pass that are kept
_HEADER = re.compile(r"^// -----// (.*?) //----- //$|^// -----// (SoftwarePipeliner .*)$", re.MULTILINE)


class CompileError(CumuloError):
    """A kernel does not compile; the message says in which line and why."""


@dataclass(frozen=True, slots=True)
class StageText:
    name: str
    text: str
    lines: list[int]  # for each line of the text the line of the kernel's file, 0 where there is none

    def rows(self) -> list[tuple[str, int]]:
        return list(zip(self.text.split("\n"), self.lines, strict=True))


@dataclass(frozen=True, slots=True)
class PassChange:
    """What one pass did to the whole module: lines that went and came."""

    name: str
    stage: str  # which it leads to
    removed: int
    added: int
    diff: str


@dataclass(frozen=True, slots=True)
class Resources:
    """Per thread but for shared memory, as the assembler says."""

    registers: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    warps: int = 0
    ctas: int = 1


@dataclass(frozen=True, slots=True)
class StagesRecord:
    launch: KernelLaunch
    target: str
    triton: str
    file: str
    first_line: int
    stages: list[StageText]
    passes: list[PassChange] = field(default_factory=list)
    resources: Resources = Resources()
    layouts: list[dict[str, Any]] = field(default_factory=list)

    def stage(self, name: str) -> StageText | None:
        return next((one for one in self.stages if one.name == name), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def record_of_json(raw: dict[str, Any]) -> StagesRecord:
    """Raises KeyError or TypeError where it is something else."""
    parts = {
        "launch": launch_of_json(raw["launch"]),
        "stages": [StageText(**one) for one in raw["stages"]],
        "passes": [PassChange(**one) for one in raw["passes"]],
        "resources": Resources(**raw["resources"]),
    }
    return StagesRecord(**raw | parts)


def record(launch: KernelLaunch, target: str) -> StagesRecord:
    if target not in TARGETS:
        known = ", ".join(TARGETS)
        raise ConfigError(
            f"there is no target {target!r}{did_you_mean(target, TARGETS)}; targets are {known}"
        )
    backend, arch, warp = TARGETS[target]
    asked = {"launch": launch.as_json(), "backend": backend, "arch": arch, "warp": warp, "path": sys.path}
    with tempfile.TemporaryDirectory(prefix="cumulo-stages-") as folder:
        answer = Path(folder) / "answer.json"
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
            "MLIR_ENABLE_DUMP": "1",
            "TRITON_ALWAYS_COMPILE": "1",
            "TRITON_CACHE_DIR": folder,
            "TRITON_DUMP_PTXAS_LOG": "1",
            "TRITON_DEFAULT_FP_FUSION": "1",
        }
        words = [sys.executable, "-m", "cumulo.compile.stages.worker", str(answer)]
        with (Path(folder) / "passes").open(
            "w+", errors="replace"
        ) as told:  # a pipe would be slow for so much
            run = subprocess.run(
                words, input=json.dumps(asked), env=environment, stdout=subprocess.PIPE, stderr=told, text=True,
                check=False,
            )  # fmt: skip
            told.seek(0)
            dump = told.read()
        if not answer.exists():
            raise CompileError(
                f"{launch.name}: the compiler ended without an answer ({_last_words(dump, run.returncode)})"
            )
        found = json.loads(answer.read_text())
    if error := found.get("error"):
        where = f"{found['file']}, line {error['line']}: " if error["line"] else ""
        code = (
            dict(enumerate(found["source"].splitlines(), found["first_line"])).get(error["line"], "").strip()
        )
        text = f"{launch.name} does not compile for {target}: {where}{error['text']}\n    {code}"
        raise CompileError(text.rstrip())
    python = found["source"].rstrip("\n")
    numbers = [found["first_line"] + index for index in range(len(python.split("\n")))]
    stages = [StageText("python", python, numbers)]
    for name, text in found["stages"].items():
        stages.append(StageText(name, *source_lines(name, text, found["file"])))
    resources = Resources(**found["resources"], **_assembled(run.stdout, found["stages"]))
    return StagesRecord(
        launch, target, found["triton"], found["file"], found["first_line"], stages,
        _changes(dump), resources, found["layouts"],
    )  # fmt: skip


def _last_words(said: str, status: int) -> str:
    missing = re.search(r"No module named '?(triton\w*)", said)
    if missing:
        return "Triton is not installed: pip install triton"
    lines = [line for line in said.splitlines() if re.search(r"[Ee]rror|Assertion|LLVM ERROR", line)]
    return (lines or said.splitlines() or [f"status {status}"])[-1].strip()


def _assembled(log: str, stages: dict[str, str]) -> dict[str, int]:
    """Registers and spills: from ptxas, or from the notes of AMD's assembly."""
    patterns = {
        "registers": r"Used (\d+) registers",
        "spill_store_bytes": r"(\d+) bytes spill stores",
        "spill_load_bytes": r"(\d+) bytes spill loads",
        "stack_bytes": r"(\d+) bytes stack frame",
    }
    if "amdgcn" in stages:
        log = stages["amdgcn"]
        patterns = {
            "registers": r"\.vgpr_count:\s*(\d+)",
            "stack_bytes": r"\.private_segment_fixed_size:\s*(\d+)",
        }
        if spilled := re.search(r"\.vgpr_spill_count:\s*(\d+)", log):
            return {"spill_store_bytes": 4 * int(spilled[1])} | _numbers(patterns, log)
    return _numbers(patterns, log)


def _numbers(patterns: dict[str, str], log: str) -> dict[str, int]:
    return {name: int(found[1]) for name, pattern in patterns.items() if (found := re.search(pattern, log))}


def _changes(dump: str) -> list[PassChange]:
    """Between what one pass over the whole module saw and what the next one saw."""
    seen = []  # name of the pass, and the module before it
    pieces = _HEADER.split(dump)
    for at in range(1, len(pieces) - 2, 3):
        header, text = pieces[at], pieces[at + 2]
        if header and header.startswith("IR Dump Before") and "('builtin.module'" in header:
            name = header.removeprefix("IR Dump Before ").split(":")[0]
            seen.append((name.removesuffix("Pass"), text))
    changes, stage = [], "ttir"
    for index, (name, before) in enumerate(seen):
        if name.startswith("ConvertTritonToTritonGPU") or "InferCoalescedEncodings" in name:
            stage = "ttgir"
        if "AllocateWarpGroups" in name or name in ("TritonGPUAllocateWarpGroups", "SCFToControlFlow"):
            stage = "llir"
        after = seen[index + 1][1] if index + 1 < len(seen) else ""
        if not after:
            break
        if before == after:
            continue
        old, new = _bare(before), _bare(after)
        if old != new:
            lines = list(difflib.unified_diff(old, new, lineterm="", n=1))[2:]
            removed = sum(line.startswith("-") for line in lines)
            added = sum(line.startswith("+") for line in lines)
            more = [f"… {len(lines) - _MOST_DIFF} more lines"] if len(lines) > _MOST_DIFF else []
            cut = [*lines[:_MOST_DIFF], *more]
            changes.append(PassChange(name, stage, removed, added, "\n".join(cut)))
    return changes


def _bare(module: str) -> list[str]:
    """Without locations, which change where nothing else does."""
    lines = (re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", line).rstrip() for line in module.splitlines())
    return [line for line in lines if line and not line.startswith(("#loc", "warning:"))]
