"""A pasted text without what terminals and launchers add: colours, carriage returns, and a prefix on each line, as
mpirun, srun, Kubernetes, log collectors and mail programs write. `diagnose` begins with it."""

import re

_ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\x1b\][^\x07]{0,500}\x07")
_STAMP = r"\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?\s?"
# Nothing else begins so; they go from every line.
_LAUNCHERS = re.compile(
    rf"^(?:(?:\[[\w-]*\d,\d+\]\s*<std\w+>:?|\[pod/[^\]]+\]|{_STAMP}(?:std(?:out|err) F )?)\s?)+", re.M
)
# They go only if most lines have them: "4: ens1: mtu 9000" is no launcher's.
_USUAL = (
    re.compile(r"^\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?:?\s", re.M),
    re.compile(r"^\s*\d{1,5}: ?", re.M),
    re.compile(r"^> ?", re.M),
    re.compile(r"^[\w.-]+-\d+\s+\| ?", re.M),
    re.compile(r"^[A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d \S+ [\w./-]+(?:\[\d+\])?: ?", re.M),
)
_MOST = 0.7  # of the lines
_WIDE = re.compile(r"\s{65,}")  # no table has such gaps, and patterns take time for them


def plain_text(text: str) -> str:
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ")
    text = _WIDE.sub(lambda gap: "\n" if "\n" in gap[0] else " " * 64, text)
    for _ in range(3):  # prefixes of several programs
        before, text = text, _without_prefixes(text)
        if text == before:
            break
    return text


def _without_prefixes(text: str) -> str:
    text = _LAUNCHERS.sub("", text)
    for prefix in _USUAL:
        lines = [line for line in text.splitlines() if line.strip()]
        found = sum(prefix.match(line) is not None for line in lines)
        if len(lines) > 2 and found >= _MOST * len(lines):
            text = prefix.sub("", text)
    return text


def line_of(found: re.Match[str]) -> str:
    """The whole line in which a pattern was found."""
    text = found.string
    return text[text.rfind("\n", 0, found.start()) + 1 :].split("\n", 1)[0].strip()[:160]
