"""The verdict by what other tools say of ports, links and topology, next to a bandwidth that is low."""

from cumulo.plan.diagnose.diagnosis import PAIRS_STEP, PORTS_STEP, TOPO_STEP, WIDTH_STEP, Diagnosis
from cumulo.plan.diagnose.link_states import link_states
from cumulo.plan.diagnose.nccl_case import NcclCase
from cumulo.plan.diagnose.topology_text import topology_matrix

_FULL = 1.02  # of what is expected: a node with a card less does not reach it


def states_verdict(case: NcclCase) -> Diagnosis | None:
    """What other tools say of ports and links, where the bandwidth is low."""
    assert case.share is not None and case.expected is not None
    states, matrix = link_states(case.text), topology_matrix(case.text)
    near = case.one_domain
    if states.down and not near:
        case.evidence.append(f"the text says: {states.down[:120]}")
        if case.enough and case.share > _FULL:
            return case.answer(
                "unknown",
                "The bandwidth is what is usual, and yet a port is down: check that it is one that nothing uses.",
                (PORTS_STEP, PAIRS_STEP),
                "low",
            )
        return case.answer(
            "rail-down", "A port is down.", (PORTS_STEP, PAIRS_STEP), "medium" if case.enough else "high"
        )
    if case.enough:
        return None
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
