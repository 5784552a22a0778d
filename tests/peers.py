"""Other projects' packages that take seconds to import, each imported when a test first asks something of it:

    from tests import peers

    peers.transformers.AutoConfig.for_model("llama")

A worker collects all files and runs half of them: what files import when they are collected, every worker pays for.
"""

from types import ModuleType

import pytest

_NAMES = ("agents", "anthropic", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name not in _NAMES:
        raise AttributeError(name)
    module: ModuleType = pytest.importorskip(name)
    if name == "transformers":
        module.logging.set_verbosity_error()
    return module
