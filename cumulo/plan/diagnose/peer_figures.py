"""What a text says in words of another run of the same kind: "the neighbour pair gives 115.6 GB/s". `diagnose`
compares a run with it, so that none is called healthy that is much slower than its like.

A specification, a hope, another GPU, another collective or another number of nodes is no such run."""

from dataclasses import dataclass

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.stated_ranks import nodes_said, stated_ranks

_FIGURE = re.compile(
    r"(?<![\w.-])~?(\d{1,4}(?:\.\d+)?)\s*(GB/s|GBps|GiB/s|GB/sec|Gb/s|Gbps|Gbit/s)?(?![\w%]|\.\d|\s*[x×]\s*\w)",
    re.I,
)
# Words of a run that was made; with those of _LIKE the unit may be missing.
_MADE = re.compile(
    r"\b(?:gives?|gave|gets?|got|does|did|do|had|was|were|saw|seen|measured?|reach(?:es|ed)?|reports?|showed|"
    r"runs? at|ran at|instead of|vs\.?|versus|against|compared|down from|(?:drop|dropp|fell|went)\w* from)\b|[=:>]",
    re.I,
)
_LIKE = re.compile(
    r"\b(?:(?:the )?others?|neighbou?r\w*|sister|sibling|twin|identical|same|baseline|before|previous\w*|"
    r"reference run|earlier|last (?:week|month|night|time|run|year|quarter)|yesterday|in the morning|"
    r"used to|bare[ -]?metal|"
    r"acceptance|burn-?in|the rest|remaining|its peers?|all the other|every other|normally|usually|still|"
    r"known[- ]good|golden|healthy|good (?:node|pair|box|host)|not updated|(?:old|previous) (?:driver|kernel|image|"
    r"firmware|container)|instead of|CUDA_VISIBLE_DEVICES|"
    r"(?:down|drop\w*|fell|fallen|went) from|"
    r"on (?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day)\b",
    re.I,
)
# "pair 2-3 gives 190 GB/s", "| dgx1 | 232 GB/s |": a figure with its unit right after the name of a machine.
_NAMED = re.compile(
    r"\b(?:(?:pairs?|nodes?|box|hosts?|machine|server|rack|GPUs?)\s+[\w+,&-]*\d[\w+,&-]*|"
    r"(?!NV|PCI|gen|CX|[NHEFX]DR|HBM|DDR|G?DDR|Connect|xGMI|ROCm|cuda|nccl|mlx|bnxt|tier|stage|v\d)[a-z][\w-]*\d[\w-]*)"
    r"\s*(?:[|:=]|gives?|gave|gets?|got|does|did|reach(?:es|ed)?|has|had)\s*~?\d+(?:\.\d+)?\s*G(?:i?B/s|i?Bps)",
    re.I,
)
_NO_RUN = re.compile(
    r"\b(?:spec\w*|theor\w*|peak|line[- ]?rate|wire(?: ?speed| ?rate)?|nominal|raw|data ?sheets?|brochure|slides?|"
    r"marketing|advertis\w*|promised|vendor|sales\w*|paid|up to|bidirectional|bi-?dir\w*|per link|ceiling|"
    r"limit|maximum|DRAM|HBM|memory|pcm\S*|disks?|NVMe|storage|memcpy|bandwidthTest|nvbandwidth|ib_\w+_bw|perftest|iperf\d?|"
    r"algbw|in theory|of raw|published|blog|docs?|paper|capable|rated|NVLink ?\d? is|PCIe (?:is|gen))\b",
    re.I,
)
_NO_CARD_RUN = re.compile(
    r"\b(?:spec\w*|theor\w*|line[- ]?rate|nominal|data ?sheets?|vendor|up to|bi-?dir\w*)\b", re.I
)
_ONE_NODE = re.compile(
    r"\b(?:(?:single|one|1|each|a|per)[ -]node|intra\S*|inside|within|locally|NVLink|NVSwitch|in the (?:node|box)|"
    r"node alone|one (?:box|host|server|machine))\b", re.I,
)  # fmt: skip
_FAR = re.compile(
    r"\b(?:inter-?node|across (?:the )?(?:nodes?|fabric|network|IB)|between nodes|multi-?node)\b", re.I
)
_GPU = re.compile(r"\b(?:GB\d{3}|[ABHV]\d{2,3}S?|L40S?|MI\d{3}\w?|RTX \w+ ?\d*)\b", re.I)
_COLLECTIVES = {
    "all_reduce": r"all[_-]?reduce",
    "all_gather": r"all[_-]?gather",
    "reduce_scatter": r"reduce[_-]?scatter",
    "all_to_all": r"all[_-]?to[_-]?all|\ba2a\b",
    "broadcast": r"broadcast|\bbcast",
    "send_recv": r"send[_-]?recv|\bp2p\b",
}
_NO_WORDS = re.compile(
    r"NCCL (?:INFO|WARN)|^\W*#|Link \d+:|_perf\b.*\s-\w|\bRank\s+\d+ .*device|bus_?bw\s*[=:]"
)
_SENTENCES = re.compile(r"(?<=[.;!?)])\s+|\s+(?:but|while|whereas)\s+|,\s+(?=[a-z])", re.I)
_MOST = 60.0  # times what was measured


@dataclass(frozen=True, slots=True)
class PeerFigure:
    rate: float  # GB/s; of a card's own test Gbit/s
    words: str


@dataclass(frozen=True, slots=True)
class RunInHand:
    """What a figure must be of, to be comparable."""

    busbw: float
    ranks: int
    nodes: int
    operation: str
    device: str


def peer_figure(text: str, own: RunInHand, least: float) -> PeerFigure | None:
    """The slowest of those that reach `least` GB/s: a text may name several."""
    found = []
    for line in text.splitlines():
        if _NO_WORDS.search(line) or len(re.findall(r"\d+\.\d+", line)) > 6:
            continue
        for sentence in _SENTENCES.split(line.strip()):
            if not _comparable(sentence, own):
                continue
            for digits, unit in _FIGURE.findall(sentence):
                figure = _gbytes(digits, unit, sentence)
                if figure is not None and least <= figure <= _MOST * own.busbw:
                    found.append(PeerFigure(figure, sentence.strip()[:120]))
    return min(found, key=lambda one: one.rate, default=None)


def peer_gbits(text: str, gbps: float) -> PeerFigure | None:
    """The same of a test of one card, in Gbit/s."""
    found = []
    for sentence in (one for line in text.splitlines() for one in _SENTENCES.split(line.strip())):
        if not _LIKE.search(sentence) or not _MADE.search(sentence) or _NO_CARD_RUN.search(sentence):
            continue
        figures = [float(digits) for digits, unit in _FIGURE.findall(sentence) if unit[1:2] == "b"]
        found += [PeerFigure(one, sentence[:120]) for one in figures if 1.2 * gbps <= one <= _MOST * gbps]
    return min(found, key=lambda one: one.rate, default=None)


def _gbytes(digits: str, unit: str, sentence: str) -> float | None:
    """Without a unit only right after a word of a run; bits are those of one card."""
    if unit[1:2] == "b":
        return None
    if not unit and not re.search(
        rf"\b(?:does|did|gives?|gave|gets?|got|had|was|baseline|do|from|of|at|:)\W+(?:\w+\W+)?~?{re.escape(digits)}",
        sentence,
        re.I,
    ):
        return None
    return float(digits) * (2**30 / 1e9 if "ib" in unit.lower() else 1.0)


def _comparable(sentence: str, own: RunInHand) -> bool:
    like = _NAMED.search(sentence) or (_LIKE.search(sentence) and _MADE.search(sentence))
    if not like or _NO_RUN.search(sentence):
        return False
    if (own.nodes > 1 and _ONE_NODE.search(sentence)) or (own.nodes == 1 and _FAR.search(sentence)):
        return False
    if any(gpu.lower() not in own.device.lower() for gpu in _GPU.findall(sentence)):
        return False
    named = [name for name, words in _COLLECTIVES.items() if re.search(words, sentence, re.I)]
    if named and own.operation not in named:
        return False
    nodes = nodes_said(sentence)
    said = stated_ranks(sentence, 0)
    counts = {*said.sure, *(one for pair in said.either for one in pair)}
    return (not nodes or nodes == own.nodes) and (not counts or own.ranks in counts)
