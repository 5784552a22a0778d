"""Numbers as the planner prints them: which have more than three digits that count, and which have no unit."""

import re

# What is counted one by one is exact; everything else has three digits at most.
_COUNTED = (
    "GPU", "GPUs", "nodes", "sequences", "tokens", "switches", "cables", "transceivers", "racks", "files", "cards",
    "replicas", "kinds", "plans", "jobs", "servers", "users", "were", "of", "cannot", "columns", "(", "×",
)  # fmt: skip
# What names things: models, devices, options and what they were given.
_NAMES = re.compile(
    r"arXiv \d+\.\d+|`[^`]*`|--\S+( [\d.e]+)?|\S*[a-z_]+[-.]\d\S*|\b\d+e\d+\b|\b(19|20)\d\d\b", re.IGNORECASE
)
_NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w,])(?P<after>[ \t]*\S*)")


def too_long(text: str) -> list[str]:
    """Where a number has more than three digits that count, or an exponent."""
    text = _NAMES.sub("", text)
    wrong = []
    for found in _NUMBER.finditer(text):
        number = found[0].removesuffix(found["after"]).replace(",", "")
        digits = (
            number.replace(".", "").strip("0") if "." not in number else number.replace(".", "").lstrip("0")
        )
        after = found["after"].strip().strip(",;:.)")
        counted = "." not in number and (not after or after.startswith(_COUNTED))
        if "e" in number or (len(digits) > 3 and not counted):
            wrong.append(text[max(0, found.start() - 30) : found.end() + 20])
    return wrong


def without_unit(text: str) -> list[str]:
    """Sentences in which a fraction stands without a unit: at the end, or before a bracket, a comma or a stop."""
    plain = _NAMES.sub("", text)
    bare = re.finditer(r"(?<![\w.,/-])\d+\.\d+(?=\s*(?:[,;:)]|\.(?!\d)|$))", plain, re.MULTILINE)
    return [plain[max(0, found.start() - 30) : found.end() + 20] for found in bare]
