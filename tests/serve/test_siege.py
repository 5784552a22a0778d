"""The siege in its short form: `python -m tests.serve.siege` is the same for as long as one likes."""

from pathlib import Path

import pytest

from tests import thorough
from tests.serve.running_server import running_server
from tests.serve.siege import SERVER, besiege, make_keys
from tests.serve.tiny_model import save_tiny_model


@pytest.mark.slow
def test_honest_clients_are_served_beside_attackers(tmp_path: Path) -> None:
    path, keys = make_keys(tmp_path)
    model = save_tiny_model(tmp_path)
    with running_server(str(model), "--api-keys", str(path), *SERVER, fresh=thorough.chosen) as server:
        report = besiege(server, keys, 600) if thorough.chosen else besiege(server, keys, 300, attacks=4)
    assert not report.problems, "\n".join(report.lines())
    assert report.answered > 10 and sum(report.attacks.values()) > 20
