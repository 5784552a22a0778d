"""What the tests of batches share: lines, uploads, waiting for an end, results by custom_id."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch

from tests.serve.running_server import RunningServer, wait_for
from tests.serve.tiny_model import NAME

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class Bench:
    server: RunningServer
    keys: dict[str, str]
    folder: Path

    def client(self, name: str = "ann") -> openai.OpenAI:
        return self.server.client(self.keys[name])


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {
        "model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, **more,
    }  # fmt: skip


def line(custom_id: str, body: Any, url: str = CHAT, method: str = "POST") -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def begin(client: openai.OpenAI, lines: list[str], endpoint: Any = CHAT) -> Batch:
    content = "\n".join(lines).encode()
    uploaded = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=uploaded.id, endpoint=endpoint, completion_window="24h", metadata={"for": "a test"}
    )


def end_of(client: openai.OpenAI, batch: Batch, server: RunningServer) -> Batch:
    def ended() -> Batch | None:
        now = client.batches.retrieve(batch.id)
        return now if now.status in ENDED else None

    found: Batch = wait_for(ended, f"the end of {batch.id}", server)
    return found


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """By custom_id; every one is there once."""
    if file_id is None:
        return {}
    written = [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
    by_id = {one["custom_id"]: one for one in written}
    assert len(by_id) == len(written)
    return by_id
