"""Tensor and sequence parallelism against the whole model: losses and all gradients in float64."""

import pytest

from cumulo.layout.layout import Layout
from cumulo.train.model import model
from tests.train.pool import run_ranks
from tests.train.split_case import DENSE, LATENT, SPARSE, TIED, Case, check, differences, rows

SPECS = {"dense": DENSE, "tied": TIED, "sparse": SPARSE, "latent": LATENT}


@pytest.mark.long
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_slices_of_matrices_have_the_whole_models_loss_and_gradients(
    name: str, sequence_parallel: bool
) -> None:
    layout = Layout(tp=2, sequence_parallel=sequence_parallel)
    check(Case(SPECS[name], layout, rows(3, 16, 3)))


def differences_in_small_chunks(rank: int, case: Case) -> dict[str, float]:
    before, model._LOGIT_BYTES = (
        model._LOGIT_BYTES,
        5 * 24 * 8,
    )  # five rows of a rank's half of the vocabulary
    try:
        return differences(rank, case)
    finally:
        model._LOGIT_BYTES = before


def test_the_loss_over_slices_of_the_vocabulary_is_made_in_chunks_of_rows() -> None:
    case = Case(DENSE, Layout(tp=2, sequence_parallel=True), rows(3, 16, 3))
    for found in run_ranks(differences_in_small_chunks, 2, case):
        assert max(found.values()) < 1e-12, found


@pytest.mark.long
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_model_in_four_slices_has_the_whole_models_loss_and_gradients(sequence_parallel: bool) -> None:
    check(Case(LATENT, Layout(tp=4, sequence_parallel=sequence_parallel), rows(2, 16, 2)))
