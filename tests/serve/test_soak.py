"""The soak in its short form: `python -m tests.serve.soak` is the same for as long as one likes."""

from collections import Counter
from pathlib import Path

import pytest

from tests import thorough
from tests.serve.running_server import running_server
from tests.serve.soak import SERVER, Memory, soak
from tests.serve.soak_clients import CLIENTS
from tests.serve.tiny_model import save_tiny_model

pytestmark = pytest.mark.long

COMMON = {name for name, kind in CLIENTS.items() if kind.weight > 2}  # chance may leave out a rare one
ENDINGS = ("probe: answered", "hangs_up_while_answered: left", "hangs_up_while_waiting: left")


def seen(outcomes: Counter[str]) -> bool:
    return {outcome.split(":")[0] for outcome in outcomes} >= COMMON and all(
        outcomes[ending] for ending in ENDINGS
    )


def enough(outcomes: Counter[str]) -> bool:
    return outcomes.total() >= 150 and seen(outcomes)


@pytest.mark.long
def test_unruly_clients_leave_nothing_behind(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path)
    with running_server(str(model), *SERVER) as server:
        report = soak(server, 600) if thorough.chosen else soak(server, 300, enough)
    assert not report.problems, "\n".join(report.lines())
    assert seen(report.outcomes), "\n".join(report.lines())


def test_a_process_that_keeps_growing_is_noticed() -> None:
    leak, steady = Memory(1), Memory(1)
    for step in range(240):
        leak.times_s.append(step / 4)
        steady.times_s.append(step / 4)
        steady.sizes_mib.append(300 + min(step, 60) / 10 + step % 7)  # warms up, and breathes
        leak.sizes_mib.append(300 + step / 3)
    assert leak.grew and leak.slope_mib_per_minute > 60
    assert not steady.grew and abs(steady.slope_mib_per_minute) < 1
