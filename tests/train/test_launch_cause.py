"""Of several ranks that ended, the one that began it is named."""

import signal
from types import SimpleNamespace

import pytest

from cumulo.train.launch import LOST, REFUSED, _cause


@pytest.mark.parametrize(
    ("codes", "rank"),
    [
        ({0: LOST, 1: -signal.SIGKILL}, 1),  # found last, and yet the first to go
        ({0: -signal.SIGTERM, 1: -signal.SIGSEGV}, 1),  # whoever is left is ended by the agent
        ({0: LOST, 1: 1}, 1),
        ({0: -signal.SIGKILL, 1: REFUSED}, 1),
        ({0: LOST, 1: LOST}, 0),
    ],
)
def test_the_rank_that_began_it_is_named(codes: dict[int, int], rank: int) -> None:
    failures = {number: SimpleNamespace(exitcode=code) for number, code in codes.items()}
    error = SimpleNamespace(failures=failures, get_first_failure=lambda: (0, failures[0]))
    assert _cause(error)[0] == rank  # type: ignore[arg-type]
