"""The page of the gateway at /: replicas, streams, retries, and buttons to drain. It is a file without code behind
it: it asks /v1/fleet, with the key that its reader types where keys are asked for."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import Response


@cache
def fleet_page() -> Response:
    text = (files("cumulo.gateway") / "web" / "fleet.html").read_text("utf-8")
    policy = (
        f"default-src 'none'; connect-src 'self'; script-src {_hash(text, 'script')}; "
        f"style-src {_hash(text, 'style')}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Response(
        text,
        media_type="text/html; charset=utf-8",
        headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"},
    )


def _hash(text: str, tag: str) -> str:
    """Of what stands in the page itself: nothing else runs."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
