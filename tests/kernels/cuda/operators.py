"""What torch asks of an operator of ours."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests import thorough

_QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


def opcheck(operator: Any, arguments: Sequence[Any], options: Mapping[str, Any] | None = None) -> None:
    """`torch.library.opcheck`; on the interpreter, the slow check through AOTAutograd is for `--thorough`."""
    more = {} if thorough.chosen or torch.cuda.is_available() else {"test_utils": _QUICK}
    torch.library.opcheck(operator, tuple(arguments), dict(options or {}), **more)
