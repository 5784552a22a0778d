"""Of several ranks that ended, the one that began it is named."""

import signal
from types import SimpleNamespace

import pytest

from cumulo.ranks.launch import LOST, REFUSED, _cause


@pytest.mark.parametrize(
    ("codes", "rank"),
    [
        ({0: (LOST, 10), 1: (-signal.SIGKILL, 10)}, 1),  # found last, and yet the first to go
        ({0: (-signal.SIGTERM, 10), 1: (-signal.SIGSEGV, 11)}, 1),  # whoever is left is ended by the agent
        ({0: (LOST, 10), 1: (1, 12)}, 1),
        ({0: (-signal.SIGKILL, 10), 1: (REFUSED, 12)}, 1),
        ({0: (LOST, 10), 1: (LOST, 10)}, 0),
        ({0: (1, 10), 1: (-signal.SIGKILL, 41)}, 0),  # by the agent: it did not end in time
        ({0: (LOST, 10), 1: (-signal.SIGKILL, 41)}, 0),
    ],
)
def test_the_rank_that_began_it_is_named(codes: dict[int, tuple[int, int]], rank: int) -> None:
    failures = {
        number: SimpleNamespace(exitcode=code, timestamp=when) for number, (code, when) in codes.items()
    }
    error = SimpleNamespace(failures=failures, get_first_failure=lambda: (0, failures[0]))
    assert _cause(error)[0] == rank  # type: ignore[arg-type]
