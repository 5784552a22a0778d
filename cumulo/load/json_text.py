"""Decoding the JSON of a token's event: msgspec where it is installed (several times cheaper), else json."""

import json
from collections.abc import Callable
from typing import Any

decode: Callable[[bytes], Any]  # raises ValueError where the bytes are not JSON
try:
    import msgspec
except ImportError:
    decode = json.loads
else:
    decode = msgspec.json.Decoder().decode
