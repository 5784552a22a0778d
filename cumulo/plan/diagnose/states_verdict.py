"""The verdict by what other tools say of ports, links and topology, next to a bandwidth."""

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.diagnosis import GDR_STEP, PAIRS_STEP, PORTS_STEP, TOPO_STEP, WIDTH_STEP, Diagnosis
from cumulo.plan.diagnose.link_states import LinkStates, link_states, whole_line
from cumulo.plan.diagnose.nccl_case import NcclCase
from cumulo.plan.diagnose.topology_text import topology_matrix

_GDR_OFF = re.compile(
    r"GPU ?Direct(?: RDMA)?,? (?:is |was |seems |RDMA )?(?:off|disabled|unavailable|"
    r"not (?:available|enabled|supported|working))|"
    r"(?:nvidia[_-]peermem|nv_peer_mem)\b[^\n]{0,20}(?:not (?:loaded|found|running|present)|missing|absent)|"
    r"\b(?:no|without) (?:GDR|GPU ?Direct|nvidia[_-]peermem|nv_peer_mem)\b|"
    r"NCCL_NET_GDR_LEVEL[ =]+(?:0|LOC)\b|\bGDR (?:is )?(?:off|disabled)\b",
    re.I,
)
_THROTTLED = re.compile(r"\b(?:Thermal|HW|Power Brake)\s*Slowdown\s*:\s*Active\b", re.I)
_CLOCKS_STEP = "run `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK` during a run"
_FULL = 1.02  # of what is expected: a node with a card less does not reach it


def states_verdict(case: NcclCase) -> Diagnosis | None:
    """What other tools say of ports and links."""
    assert case.share is not None and case.expected is not None
    states, matrix = link_states(case.text), topology_matrix(case.text)
    near = case.one_domain
    if case.enough:
        return _despite(case, states)
    if states.down and not near:
        case.evidence.append(f"the text says: {states.down[:120]}")
        return case.answer("rail-down", "A port is down.", (PORTS_STEP, PAIRS_STEP), "high")
    if not near and (found := far_cards(case)) is not None:
        return found
    active, inactive = states.nvlinks
    no_nvlink = matrix is not None and matrix.nvlink is False
    if near and case.expected.has_nvlink and (no_nvlink or (inactive and not active)):
        case.evidence.append("nvidia-smi shows no NVLink between the GPUs")
        return case.answer("pcie-not-nvlink", "GPUs of a node do not use NVLink.", (TOPO_STEP,), "high")
    if states.downgraded or (near and inactive):
        case.evidence.append(
            f"lspci says: {states.downgraded[:120]}"
            if states.downgraded
            else f"{inactive} NVLinks are inactive, {active} active"
        )
        return case.answer("slow-link", "A link runs below its rate.", (WIDTH_STEP, TOPO_STEP), "high")
    return None


def _despite(case: NcclCase, states: LinkStates) -> Diagnosis | None:
    """The bandwidth is near to what is usual, and yet the text names a fault: healthy is not said."""
    assert case.share is not None
    near = case.one_domain
    active, inactive = states.nvlinks
    gdr_off = _GDR_OFF.search(case.text) if not near and not (case.log and case.log.gdr_on) else None
    throttled = _THROTTLED.search(case.text)
    links = f"{inactive} NVLinks inactive, {active} active" if near and inactive and active else ""
    faults: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
        ("" if near else states.down, "rail-down", "A port is down.", (PORTS_STEP, PAIRS_STEP)),
        (whole_line(gdr_off) if gdr_off else "", "no-gdr", "GPUDirect RDMA is off.", (GDR_STEP, TOPO_STEP)),
        (states.narrow, "slow-link", "A link runs below its rate.", (WIDTH_STEP, TOPO_STEP)),
        (links, "slow-link", "Some NVLinks are down.", (TOPO_STEP,)),
        (whole_line(throttled) if throttled else "", "unknown", "A GPU is throttled.", (_CLOCKS_STEP,)),
    )
    named = next((one for one in faults if one[0]), None)
    if named is None:
        return None
    words, cause, sentence, steps = named
    case.evidence.append(f"the text says: {words.strip()[:120]}")
    if case.share > _FULL:
        doubt = (
            f"The bandwidth is what is usual, and yet the text says: {sentence} Check that this run uses it."
        )
        return case.answer("unknown", doubt, steps, "low")
    return case.answer(cause, sentence, steps, "medium")


def far_cards(case: NcclCase) -> Diagnosis | None:
    """GPUs of one socket whose cards all hang on the other one."""
    matrix = topology_matrix(case.text)
    if matrix is None or not matrix.far or not matrix.near:
        return None
    case.evidence.append(
        f"{', '.join(matrix.far)} reach every card across sockets (SYS), {', '.join(matrix.near)} do not"
    )
    return case.answer(
        "shared-path",
        "GPUs of one socket send through the other socket's cards.",
        ("allow PXN (remove NCCL_PXN_DISABLE=1), so that GPUs hand data to one that has a card", TOPO_STEP),
        "medium",
    )
