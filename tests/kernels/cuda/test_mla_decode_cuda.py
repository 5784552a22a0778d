"""GPU latent attention against float64 and the absorbed form on the CPU; merging partial attentions."""

from types import SimpleNamespace

import pytest
import torch

from cumulo.errors import CumuloError
from cumulo.kernels.cuda.merge import merge
from cumulo.kernels.cuda.merge import reference as merge_reference
from cumulo.kernels.cuda.mla_decode import MlaConfig, MlaPlan, reference
from cumulo.kernels.paged_attention import reference as cpu_reference
from tests.kernels.cuda.paged_case import PagedCase
from tests.kernels.cuda.tolerance import poisoned, relative_error

RANK, ROPE = 32, 16
SMALL = MlaConfig(rows=16, key_tile=16, num_warps=4, num_stages=2, items_per_sm=9, min_tiles=1)


def latent_case(lengths: list[int], heads: int, device: torch.device) -> PagedCase:
    return PagedCase([(1, n) for n in lengths], heads, 1, RANK + ROPE, device=device)


def run(case: PagedCase, config: MlaConfig | None = SMALL, **options: int) -> torch.Tensor:
    plan = MlaPlan(
        len(case.sequences), case.heads, RANK, ROPE, case.block_size, case.block_tables.shape[1],
        case.device, windows=(options.get("window"),), config=config,
    )  # fmt: skip
    plan.prepare(case.query_starts, case.context_lengths, case.block_tables)
    out = poisoned(case.tokens, case.heads, RANK, dtype=case.dtype, device=case.device)
    lse = poisoned(case.tokens, case.heads, dtype=torch.float32, device=case.device)
    plan.attend(case.query, case.keys, out, case.scale, lse=lse, **options)  # type: ignore[arg-type]
    batch = (case.query_starts, case.context_lengths, case.block_tables, RANK, case.scale)
    exact, exact_lse = reference(case.query.double(), case.keys.double(), *batch, **options)
    same, same_lse = reference(case.query, case.keys, *batch, **options)
    assert relative_error(out, exact) <= 2 * max(relative_error(same, exact), torch.finfo(case.dtype).eps / 2)
    assert relative_error(lse, exact_lse) <= 2 * max(relative_error(same_lse, exact_lse), 6e-8)
    return out


@pytest.mark.parametrize("heads", [3, 16, 24])
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
        MlaPlan(1, 16, 100, 64, 64, 4, device)


def sides(device: torch.device, dim: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(2):
        made.append(torch.randn((5, 6, dim), generator=generator).half().to(device))
        made.append(4 * torch.randn((5, 6), generator=generator).to(device))
    return made


def test_merged_halves_equal_attention_over_all_keys(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn((9, 40, 16), generator=generator, dtype=torch.float64) for _ in range(3))
    scores = query @ key.transpose(1, 2)
    halves = []
    for part in (slice(0, 13), slice(13, 40)):
        halves += [
            (scores[..., part].softmax(-1) @ value[:, part]).float().to(device),
            scores[..., part].logsumexp(-1).float().to(device),
        ]
    out, lse = merge(*halves)
    assert relative_error(out.cpu(), scores.softmax(-1) @ value) < 1e-6
    assert relative_error(lse.cpu(), scores.logsumexp(-1)) < 1e-6


def test_a_side_that_saw_nothing_is_ignored_whatever_it_holds(device: torch.device) -> None:
    out_a, lse_a, out_b, lse_b = sides(device)
    lse_a[0], lse_b[0:2] = float("-inf"), float("-inf")
    out_a[0], out_b[0:2] = float("nan"), float("nan")
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[0], torch.zeros_like(out[0])) and lse[0].isinf().all()
    assert torch.equal(out[1], out_a[1]) and torch.allclose(lse[1], lse_a[1])
    expected, expected_lse = merge_reference(out_a, lse_a, out_b, lse_b)
    assert relative_error(out[2:], expected[2:]) < 1e-3 and relative_error(lse[1:], expected_lse[1:]) < 1e-6


def test_gradients_of_merge_match_those_of_its_formula(device: torch.device) -> None:
    inputs = [part.float().requires_grad_() for part in sides(device)]
    upstream = torch.randn((5, 6, 24), generator=torch.Generator().manual_seed(1)).to(device)

    def gradients(function: object, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        given = [part.detach().to(dtype).requires_grad_() for part in inputs]
        out, lse = function(*given)  # type: ignore[operator]
        return torch.autograd.grad((out * upstream).sum() + (lse**2).sum(), given)

    for ours, exact in zip(
        gradients(merge, torch.float32), gradients(merge_reference, torch.float64), strict=True
    ):
        assert relative_error(ours, exact) < 1e-5


def test_merge_passes_opcheck_and_takes_strided_outputs(device: torch.device) -> None:
    out_a, lse_a, out_b, lse_b = sides(device)
    torch.library.opcheck(
        merge, (out_a.float().requires_grad_(), lse_a, out_b.float().requires_grad_(), lse_b)
    )
    wide = torch.randn((5, 9, 24), device=device).half()
    strided, dense = (
        merge(wide[:, 2:8], lse_a, out_b, lse_b),
        merge(wide[:, 2:8].contiguous(), lse_a, out_b, lse_b),
    )
    assert torch.equal(strided[0], dense[0])
