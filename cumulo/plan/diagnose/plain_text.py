"""A pasted text without what terminals and launchers add: colours, carriage returns, and a prefix on each line, as
mpirun, srun, Kubernetes, log collectors and mail programs write. `diagnose` begins with it."""

import re

_ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\s?"
# Nothing else begins so; they go from every line.
_LAUNCHERS = re.compile(
    rf"^(?:(?:\[[\w-]*\d,\d+\]\s*<std\w+>:?|\[pod/[^\]]+\]|{_STAMP}(?:std(?:out|err) F )?|std(?:out|err) F )\s?)+",
    re.M,
)
# They go only if most lines have them: "4: ens1: mtu 9000" is no launcher's.
_USUAL = (
    re.compile(r"^\s*\d{1,5}: ?", re.M),
    re.compile(r"^> ?", re.M),
    re.compile(r"^[\w.-]+-\d+\s+\| ?", re.M),
)
_MOST = 0.7


def plain_text(text: str) -> str:
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    text = _LAUNCHERS.sub("", text)
    for prefix in _USUAL:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) > 2 and sum(prefix.match(line) is not None for line in lines) >= _MOST * len(lines):
            text = prefix.sub("", text)
    return text
