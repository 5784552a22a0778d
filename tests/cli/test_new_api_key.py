"""`cumulo serve --new-api-key`: what is typed next to it belongs to the key."""

from pathlib import Path

from cumulo.serve.access.keys import ApiKeys, Caller, read_keys
from cumulo.spec.slo import Slo
from tests.cli.conftest import Run


def test_a_key_is_made_with_a_promise_or_refused_with_the_reason(tmp_path: Path, cumulo: Run) -> None:
    path = str(tmp_path / "keys.json")
    ran = cumulo("serve", "--api-keys", path, "--new-api-key", "ann", "--slo", "ttft=300ms,itl=30ms")
    caller = ApiKeys(Path(path), Caller("anyone")).caller_of(ran.out.strip())
    assert caller is not None and caller.slo == Slo(0.3, 0.03)
    ran = cumulo("serve", "--api-keys", path, "--new-api-key", "bob", "--slo", "ttft=300")
    assert ran.code == 2 and "--slo needs units" in ran.err and len(read_keys(Path(path))) == 1
