"""How many ranks a text says a run had: by its command, its log, its list of devices, and in people's own words.
`diagnose` compares them with the number that the bandwidths show."""

from dataclasses import dataclass

from cumulo.base import quick_re as re

_GPU = r"(?:NVIDIA\s+|AMD\s+|Tesla\s+|Instinct\s+)*(?:GB\d{3}|[ABHVLP]\d{2,3}\w?|MI\d{3}\w?)\b"
_MANY = r"(?:nodes?|hosts?|servers?|machines?|instances?|boxes)\b"
_LAUNCH = re.compile(r"\b(?:mpirun|mpiexec|srun|prun|orterun)\b(.*?_perf\b.*)", re.DOTALL)
_ALONE = re.compile(r"(?:^|[\s/$])\w+_perf\b(.*)", re.MULTILINE)
_PROCESSES = re.compile(r"(?:^|\s)(?:-np?|--np|--ntasks)[\s=]*(\d+)\b")
_NODES = re.compile(r"(?:^|\s)(?:-N|--nodes)[\s=]*(\d+)\b")
_EACH_NODE = re.compile(r"(?:--ntasks-per-node|-npernode|--npernode|-ppn|--map-by ppr:)[\s=]*(\d+)")
_SLOTS = re.compile(r"(?:-H|--host)\s+(\S+)")
_GPUS = re.compile(r"(?:^|\s)(?:-g|--ngpus)[\s=]*(\d+)\b")
_THREADS = re.compile(r"(?:^|\s)(?:-t|--nthreads)[\s=]*(\d+)\b")
_LOGGED = re.compile(r"\bnranks\s+(\d+)", re.IGNORECASE)
# In words: "2 nodes of 8 GPUs", "4 x 8 H100", "8x H100 per node", "16 GPUs", "ranks 0-15".
_PRODUCT = re.compile(
    rf"\b(\d+)\s*{_MANY}\s*(?:x|×|\*|with|of)\s*(\d+)\s*(?:x|×|\*)?\s*(?:GPUs?\b|{_GPU})|"
    rf"\b(\d+)\s*(?:x|×)\s*(\d+)\s*(?:x|×)?\s*(?:GPUs?\b|{_GPU})|"
    r"\bworld(?:[ _-]?size)?\s*[:=]\s*(\d+)\s*[x×*]\s*(\d+)",
    re.IGNORECASE,
)
_PER_NODE = re.compile(
    rf"\b(\d+)\s*(?:x|×|\*)?\s*(?:GPUs?\b|{_GPU})[^.\n,;]{{0,24}}?"
    r"(?:(?:\bper|/|\ba|\bevery|\beach)\s*(?:node|host|server|machine)\b|\beach\b)",
    re.IGNORECASE,
)
_NODES_SAID = re.compile(
    rf"\b(\d+|two|three|four|eight|sixteen)(?:\s*[x×-]\s*|\s+)"
    rf"(?!{_GPU}\s+(?:node|host|server|machine|instance|box)\b)(?:(?!GPU)\w+\s+)?{_MANY}|\bnodes\s*[:=]\s*(\d+)",
    re.IGNORECASE,
)
# "2x a2-highgpu-8g", "4 x p5.48xlarge", "2x DGX H100"
_MACHINES_SAID = re.compile(
    r"\b(\d+)\s*[x×]\s*(?:[a-z]\d\w*-\w+-\d+g?\b|[a-z]\d\w*(?:-\w+)?\.\w*(?:large|metal)|(?:Standard_)?N[DC]\d+\w*|"
    r"BM\.GPU|[DH]GX)",
    re.IGNORECASE,
)
_NUMBERS = {"two": 2, "three": 3, "four": 4, "eight": 8, "sixteen": 16}
_PLAIN = (
    re.compile(rf"\b(\d+)\s*(?:x|×)\s*{_GPU}", re.IGNORECASE),
    re.compile(r"\b(\d+)[ -]+(?:GPUs?|ranks?)\b", re.IGNORECASE),
    re.compile(r"\b(?:world[ _-]?size|ranks|n?gpus|ntasks)\s*[:=]\s*(\d+)", re.IGNORECASE),
    re.compile(r"\bworld[ _-]?size\s+(\d+)", re.IGNORECASE),
    re.compile(r"\bworld\s*[:=]\s*(\d+)\b(?!\s*[x×*])", re.IGNORECASE),
)
# A machine's GPUs, of which a run may use a few: "an 8x H100 box", "4 of 8 GPUs".
_MACHINE = re.compile(
    rf"\b\d+\s*[x×-]?\s*(?:GPUs?\b|{_GPU})(?:\s+\w+){{0,2}}?[\s-]+(?:node|host|server|machine|instance|box|system|"
    r"workstation|chassis|baseboard|cluster|pod)s?\b|"
    rf"\b(?:out of|of|has|have|with)\s+(?:our\s+|the\s+)?\d+\s*[x×-]?\s*(?:GPUs?\b|{_GPU})",
    re.IGNORECASE,
)
_SUBSET = re.compile(
    r"CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|\b\d+ (?:out )?of (?:the |its |our )?\d+\b|\bonly \d+ GPUs"
)
_EVERY = re.compile(rf"\ball\s+(?:the\s+)?(\d+)\s*(?:x\s*)?(?:GPUs?\b|ranks?\b|{_GPU})", re.IGNORECASE)
_NO_WORDS = re.compile(r"_perf\b.*\s-\w|NCCL INFO|\bRank\s+\d+ .*device|^\s*\d+\s+\d+\s+[a-z]")
_RANGE = re.compile(r"\branks\s+0\s*(?:\.\.|-|–|to)\s*(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StatedRanks:
    sure: tuple[int, ...]
    command: int | None = None  # of `sure`, what the command asks for
    nodes: int = 0  # in words; 0: not said
    either: tuple[tuple[int, int], ...] = ()  # "2 nodes, 8 GPUs": all of them, or those of each node
    words: tuple[int, ...] = ()  # of `sure`, what is said of the run in words
    every: tuple[int, ...] = ()  # "all 8 GPUs"

    @property
    def last(self) -> int | None:
        found = self.sure or tuple(most for _, most in self.either)
        return found[-1] if found else None

    def wrong(self, least: float, most: float) -> tuple[int, ...]:
        """Those that are not within."""
        sure = [one for one in self.sure if one > 1 and not least <= one <= most]
        return (
            *sure,
            *(whole for whole, each in self.either if not any(least <= one <= most for one in (whole, each))),
        )


def stated_ranks(text: str, listed: int) -> StatedRanks:
    """Each number of ranks that is stated, once; `listed`: devices that the header lists, 0 if it is cut off."""
    words = "\n".join(line for line in text.splitlines() if not _NO_WORDS.search(line))
    sure, either = _in_words(words)
    of_run = _in_words(_MACHINE.sub(" ", words))[0] if sure else []
    command = _by_command(text)
    sure = command + [int(one) for one in _LOGGED.findall(text)] + sure
    if listed:
        sure.append(listed)
    return StatedRanks(
        tuple(dict.fromkeys(one for one in sure if one > 0)),
        command[0] if command else None,
        nodes_said(text),
        tuple(dict.fromkeys(either)),
        () if _SUBSET.search(text) else tuple(one for one in of_run if one > 1),
        tuple(int(one) for one in _EVERY.findall(text)),
    )


def _by_command(text: str) -> list[int]:
    joined = re.sub(r"\\\s*\n\s*", " ", text)  # a command over several lines
    for line in joined.splitlines():
        if launch := _LAUNCH.search(line):
            before, _, after = re.split(r"(_perf\b)", launch[1], maxsplit=1)
            processes = _processes(before)
            return [processes * _each(after)] if processes else []
        if (alone := _ALONE.search(line)) and "starting" not in line and _GPUS.search(alone[1]):
            return [_each(alone[1])]
    return []


def _processes(arguments: str) -> int:
    if found := _PROCESSES.search(arguments):
        return int(found[1])
    nodes, each = _NODES.search(arguments), _EACH_NODE.search(arguments)
    if nodes and each:
        return int(nodes[1]) * int(each[1])
    if slots := _SLOTS.search(arguments):
        counts = [int(one) for one in re.findall(r":(\d+)", slots[1])]
        return sum(counts) if counts else 0
    return 0


def _each(arguments: str) -> int:
    """Ranks of one process of nccl-tests: threads × GPUs of each."""
    gpus, threads = _GPUS.search(arguments), _THREADS.search(arguments)
    return (int(gpus[1]) if gpus else 1) * (int(threads[1]) if threads else 1)


def nodes_said(words: str) -> int:
    """The largest number of nodes that is stated; 0: none is."""
    found = [first or second for first, second in _NODES_SAID.findall(words)] + _MACHINES_SAID.findall(words)
    return max((_NUMBERS.get(one.lower()) or int(one) for one in found), default=0)


def _in_words(words: str) -> tuple[list[int], list[tuple[int, int]]]:
    sure = [
        int(found[0] or found[2] or found[4]) * int(found[1] or found[3] or found[5])
        for found in _PRODUCT.findall(words)
    ]
    words = _PRODUCT.sub(" ", words)
    nodes = nodes_said(words)
    sure += [int(one) * nodes for one in _PER_NODE.findall(words) if nodes]
    words = _PER_NODE.sub(" ", words)
    plain = [int(one) for pattern in _PLAIN for one in pattern.findall(words)]
    plain += [int(one) + 1 for one in _RANGE.findall(words)]
    if nodes > 1:
        return sure, [(one, one * nodes) for one in plain if one > 1]
    return sure + plain, []
