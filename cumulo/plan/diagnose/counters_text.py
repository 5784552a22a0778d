"""Counters of cards and switches that say a network is congested: pauses, marks, losses. `diagnose` calls it.

Texts are those of `ethtool -S`, `rdma statistic`, `mlnx_qos` and switches' own: a name, and a number after it."""

from cumulo.base import quick_re as re

_COUNTER = re.compile(
    r"\b((?:[rt]x_prio\d_(?:pause|discards?)(?:_duration|_transition)?)|[rt]x_pause(?:_ctrl_phy)?|[rt]x_discards_phy|"
    r"out_of_(?:buffer|sequence)|packet_seq_err|local_ack_timeout_err|rnr_nak_retry_err|np_cnp_sent|"
    r"roce_(?:adp|slow)_retrans\w*|[rt]x_prio\d_buf_discard|"
    r"rp_cnp_handled|np_ecn_marked_roce_packets|PortXmitWait|PortXmitDiscards|[Tt]x ?PFC|[Rr]x ?PFC)"
    r"\s*[:=.]*(?: on [\w-]+)?[\s:]*\+?(\d[\d,]*)"
)
_MANY = 100_000  # pauses and marks; some are usual
_LOST_MANY = 100  # packets lost or out of order


def counters_of(text: str) -> dict[str, int]:
    """Each with its highest value."""
    found: dict[str, int] = {}
    for name, digits in _COUNTER.findall(text):
        found[name] = max(found.get(name, 0), int(digits.replace(",", "")))
    return found


def congestion_counters(text: str) -> list[tuple[str, int]]:
    """Those that are high, the highest first."""
    losses = ("discard", "Discards", "out_of", "seq_err", "timeout", "rnr", "retrans")
    high = [
        (name, count)
        for name, count in counters_of(text).items()
        if count >= (_LOST_MANY if any(word in name for word in losses) else _MANY)
    ]
    return sorted(high, key=lambda one: -one[1])
