"""A hub on this machine, as Hugging Face's: models, lists of files with checksums, files that can be resumed."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    def __init__(self, url: str) -> None:
        self.url = url
        self.models: dict[str, dict[str, bytes]] = {}
        self.told: dict[str, Any] = {"cardData": {"license": "apache-2.0"}}
        self.asked: list[tuple[str, str]] = []  # path, and range
        self.cut_after = 0  # so many bytes of an answer come, and then the connection ends; 0: all
        self.spoils = ""  # a file whose content is not what the list says
        self.resumes = True

    def listing(self, files: dict[str, bytes]) -> list[dict[str, Any]]:
        rows = []
        for path, content in files.items():
            row: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
            row["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            if path.endswith((".gguf", ".safetensors")):
                row["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}
            rows.append(row)
        return [*rows, {"type": "directory", "path": "folder", "size": 0, "oid": "0"}]


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            asked = self.headers.get("Range", "")
            hub.asked.append((path, asked))
            for name, files in hub.models.items():
                if path == f"/api/models/{name}":
                    return self.say({"id": name, "sha": "c0ffee", **hub.told})
                if path == f"/api/models/{name}/tree/c0ffee":
                    return self.say(hub.listing(files))
                file = path.removeprefix(f"/{name}/resolve/c0ffee/")
                if file in files:
                    return self.give(file, files[file], asked)
            return self.say({"error": "Repository not found"}, 401)

        def say(self, content: Any, status: int = 200) -> None:
            told = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def give(self, path: str, content: bytes, asked: str) -> None:
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and hub.resumes else 0
            if path == hub.spoils:
                content = content[:-1] + b"?"
            content = content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: hub.cut_after] if hub.cut_after else content)
            self.close_connection = True

    return Handler


@contextmanager
def running_hub() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = _handler(hub)
    serving = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    serving.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
