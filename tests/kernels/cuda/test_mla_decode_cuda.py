"""GPU latent attention of sequences with one new token against float64."""

import pytest
import torch

from cumulo.kernels.cuda.attention.mla_decode import MlaConfig
from tests.kernels.cuda.paged_case import PagedCase
from tests.thorough import rare

RANK, ROPE = 32, 16
SMALL = MlaConfig(rows=16, key_tile=16, num_warps=4, num_stages=2, items_per_sm=9, min_tiles=1)


def latent_case(lengths: list[int], heads: int, device: torch.device) -> PagedCase:
    return PagedCase([(1, n) for n in lengths], heads, 1, RANK + ROPE, RANK, device=device)


@pytest.mark.parametrize("heads", [3, 16, *rare(24)])
def test_latent_decodes_match(heads: int, device: torch.device) -> None:
    latent_case([1, 16, 17, 90], heads, device).check({"decode": SMALL})


def test_latent_decodes_with_a_window_match(device: torch.device) -> None:
    latent_case([5, 90], 16, device).check({"decode": SMALL}, window=20)


def test_the_default_configuration_matches(device: torch.device) -> None:
    latent_case([40, 100], 16, device).check()
