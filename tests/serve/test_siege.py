"""The siege in its short form: `python -m tests.serve.siege` is the same for as long as one likes."""

from pathlib import Path

import pytest

from tests import thorough
from tests.serve.siege import HONEST_CLIENTS, PROMPTS, besiege, besieged_server
from tests.serve.siege_attackers import THREADS

pytestmark = pytest.mark.long


@pytest.mark.parametrize("gateway", [False, True], ids=["server", "gateway"])
def test_honest_clients_are_served_beside_attackers(tmp_path: Path, gateway: bool) -> None:
    with besieged_server(tmp_path, gateway=gateway) as besieged:
        report = besiege(besieged, 600 if thorough.chosen else 3)
    assert not report.problems, "\n".join(report.lines())
    # However slow the machine is, every attacker attacks once at least, and honest clients ask meanwhile.
    assert report.answered >= HONEST_CLIENTS and sum(report.attacks.values()) >= THREADS
    assert report.batched >= len(PROMPTS)
