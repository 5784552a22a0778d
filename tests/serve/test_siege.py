"""The siege in its short form: `python -m tests.serve.siege` is the same for as long as one likes."""

from pathlib import Path

import pytest

from tests import thorough
from tests.serve.running_server import running_server
from tests.serve.siege import HONEST_CLIENTS, SERVER, besiege, make_keys
from tests.serve.siege_attackers import THREADS
from tests.serve.tiny_model import save_tiny_model

pytestmark = pytest.mark.long


@pytest.mark.long
def test_honest_clients_are_served_beside_attackers(tmp_path: Path) -> None:
    path, keys = make_keys(tmp_path)
    model = save_tiny_model(tmp_path)
    with running_server(str(model), "--api-keys", str(path), *SERVER) as server:
        report = besiege(server, keys, 600 if thorough.chosen else 3)
    assert not report.problems, "\n".join(report.lines())
    # However slow the machine is, every attacker attacks once at least, and honest clients ask meanwhile.
    assert report.answered >= HONEST_CLIENTS and sum(report.attacks.values()) >= THREADS
