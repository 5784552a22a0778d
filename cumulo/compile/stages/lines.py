"""Which line of the kernel's file each line of a stage comes from: MLIR's loc(…), LLVM's !dbg, PTX's .loc and the
comments of the disassembler, each followed through inlined calls to the kernel's own file. Called by `record`.
"""

import re
from collections.abc import Iterator


def source_lines(stage: str, text: str, file: str) -> tuple[str, list[int]]:
    """The text, without what only says where its lines come from, and for each line that place (0: unknown)."""
    shown = {"llir": _llvm, "ptx": _assembly, "amdgcn": _assembly, "sass": _sass}.get(stage, _mlir)(
        text, file
    )
    pairs = list(shown)
    return "\n".join(line for line, _ in pairs), [number for _, number in pairs]


_MLIR_DEFINED = re.compile(r"^(#loc\d*) = loc\((.*)\)$")


def _mlir(text: str, file: str) -> Iterator[tuple[str, int]]:
    defined = {found[1]: found[2] for line in text.splitlines() if (found := _MLIR_DEFINED.match(line))}
    known: dict[str, int] = {}

    def place(told: str, depth: int = 0) -> int:
        """The innermost frame in the kernel's file: a call site names the called one first."""
        if told in known or depth > 50:
            return known.get(told, 0)
        for found in re.finditer(r'"([^"]*)":(\d+):\d+|(#loc\d*)', told):
            if found[3]:
                line = place(defined.get(found[3], ""), depth + 1)
            else:
                line = int(found[2]) if found[1] == file else 0
            if line:
                known[told] = line
                return line
        return 0

    for line in text.splitlines():
        if _MLIR_DEFINED.match(line):
            continue
        last = line.rfind(" loc(")
        if last < 0 or not line.endswith(")"):
            yield line, 0
        else:
            bare = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", line[:last])
            yield bare, place(line[last + len(" loc(") : -1])


def _llvm(text: str, file: str) -> Iterator[tuple[str, int]]:
    nodes = dict(re.findall(r"^(!\d+) = (?:distinct )?(!DI.*)$", text, re.MULTILINE))

    def of(node: str, name: str) -> str:
        found = re.search(rf"\b{name}: (!?\w+|\"[^\"]*\")", nodes.get(node, ""))
        return found[1].strip('"') if found else ""

    def file_of(scope: str) -> str:
        while scope and not nodes.get(scope, "").startswith("!DIFile"):
            scope = of(scope, "file") or of(scope, "scope")
        return f"{of(scope, 'directory')}/{of(scope, 'filename')}" if scope else ""

    known: dict[str, int] = {}
    for line in text.splitlines():
        if line.startswith(("!", "attributes #", "target ", "source_filename", "; ModuleID", "declare")):
            continue
        number, node = 0, (re.findall(r"!dbg (!\d+)", line) or [""])[-1]
        if node and node not in known:
            at = node
            while at and file_of(of(at, "scope")) != file:
                at = of(at, "inlinedAt")
            known[node] = int(of(at, "line") or 0) if at else 0
        number = known.get(node, 0)
        yield re.sub(r",? !dbg !\d+| #\d+(?= *[!{]|$)", "", line), number


def _assembly(text: str, file: str) -> Iterator[tuple[str, int]]:
    files = {}
    for named in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', text, re.MULTILINE):
        files[named[1]] = f"{named[2]}/{named[3]}" if named[3] else named[2]
    number = 0
    for line in text.splitlines():
        if found := re.match(r"^\s*\.loc\s+(\d+)\s+(\d+)(.*)$", line):
            inlined = re.search(r"inlined_at (\d+) (\d+)", found[3])
            comment = re.search(r"@\[ (\S*?):(\d+):", found[3])  # AMD's says it in a comment
            if files.get(found[1]) == file:
                number = int(found[2])
            elif inlined and files.get(inlined[1]) == file:
                number = int(inlined[2])
            elif comment and file.endswith(comment[1]):
                number = int(comment[2])
            continue
        if re.match(r"^\s*\.section\s+\.debug|^\s*\.file\s|^\s*//\s*-- End", line):
            number = 0
            if "debug" in line:
                return
            continue
        is_label = re.match(r"^\$?\.?L?\$?L?(__)?(tmp|func|info)", line.strip()) is not None
        if line.strip() and not is_label:
            yield line, number if line[:1] in "\t " else 0


def _sass(text: str, file: str) -> Iterator[tuple[str, int]]:
    number, place = 0, re.compile(r'//## File "([^"]*)", line (\d+)(?: inlined at "([^"]*)", line (\d+))?')
    fresh = True
    for line in text.splitlines():
        if found := place.search(line):
            # Frames follow one another, the innermost first; the first in the kernel's file counts.
            if fresh:
                number = 0
            fresh = False
            if not number:
                number = int(found[2]) if found[1] == file else int(found[4] or 0) if found[3] == file else 0
            continue
        fresh = True
        if re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            bare = re.sub(r"^\s*/\*([0-9a-f]+)\*/\s*", r"\1  ", line).rstrip()
            yield bare.removesuffix(" ;"), number
        elif re.match(r"^\.L_\w+:", line):
            yield line, 0
