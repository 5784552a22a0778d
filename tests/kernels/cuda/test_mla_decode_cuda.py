"""GPU latent attention against float64 and the absorbed form on the CPU; merging partial attentions."""

from types import SimpleNamespace

import pytest
import torch

from cumulo.errors import CumuloError
from cumulo.kernels.cpu.paged_attention import reference as cpu_reference
from cumulo.kernels.cuda.attention.latent_plan import LatentPlan
from cumulo.kernels.cuda.attention.mla_decode import MlaConfig, reference
from tests.kernels.cuda.paged_case import PagedCase
from tests.kernels.cuda.tolerance import poisoned, relative_error
from tests.thorough import rare

RANK, ROPE = 32, 16
SMALL = MlaConfig(rows=16, key_tile=16, num_warps=4, num_stages=2, items_per_sm=9, min_tiles=1)


def latent_case(lengths: list[int], heads: int, device: torch.device) -> PagedCase:
    return PagedCase([(1, n) for n in lengths], heads, 1, RANK + ROPE, device=device)


def run(case: PagedCase, config: MlaConfig | None = SMALL, **options: int) -> torch.Tensor:
    plan = LatentPlan(
        case.tokens, len(case.sequences), case.heads, RANK, ROPE, case.block_size, case.block_tables.shape[1], True,
        False, case.device, windows=(options.get("window"),), decode=config,
    )  # fmt: skip
    plan.prepare(case.query_starts, case.context_lengths, case.block_tables)
    out = poisoned(case.tokens, case.heads, RANK, dtype=case.dtype, device=case.device)
    plan.attend(case.query, case.keys, out, case.scale, **options)  # type: ignore[arg-type]
    batch = (case.query_starts, case.context_lengths, case.block_tables, RANK, case.scale)
    exact = reference(case.query.double(), case.keys.double(), *batch, **options)
    same = reference(case.query, case.keys, *batch, **options)
    assert relative_error(out, exact) <= 2 * max(relative_error(same, exact), torch.finfo(case.dtype).eps / 2)
    return out


@pytest.mark.parametrize("heads", [3, 16, *rare(24)])
def test_latent_decodes_match(heads: int, device: torch.device) -> None:
    run(latent_case([1, 16, 17, 90], heads, device))


def test_latent_decodes_with_a_window_match(device: torch.device) -> None:
    run(latent_case([5, 90], 16, device), window=20)


def test_the_default_configuration_matches_and_the_cpu_form_agrees(device: torch.device) -> None:
    case = latent_case([40, 100], 16, device)
    out = run(case, config=None)
    batch = SimpleNamespace(
        query_starts=case.query_starts, context_lengths=case.context_lengths, block_tables=case.block_tables
    )
    cpu = cpu_reference(
        case.query.double(), case.keys.double(), case.keys[..., :RANK].double(), batch, case.scale
    )
    assert relative_error(out, cpu) < 2e-3


def test_a_rank_without_a_kernel_is_refused_in_words(device: torch.device) -> None:
    with pytest.raises(CumuloError, match="powers of two"):
        LatentPlan(1, 1, 16, 100, 64, 64, 4, True, False, device)
