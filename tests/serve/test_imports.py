"""What the API process imports: it starts while the engine's process loads torch, and must not load it, too."""

import subprocess
import sys

import pytest


@pytest.mark.long
def test_the_servers_modules_import_no_torch() -> None:
    program = "import sys, cumulo.serve.server, cumulo.console.install; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
