"""Several models in one server: a request names the one that answers, and it is loaded if it is not in memory.

python examples/several_models.py     # both names are the built-in model here: --models NAME=MODEL takes any other
"""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
url = f"http://127.0.0.1:{port}"
options = ["--models", "second=built-in", "--models-memory-gib", "2", "--models-idle", "60"]
small = ["--kv-memory-gib", "0.1", "--no-console", "--port", str(port)]


def ask(path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


server = subprocess.Popen(
    [sys.executable, "-m", "cumulo", "serve", "built-in", "--name", "first", *options, *small]
)
try:
    while True:
        try:
            print("models:", ", ".join(model["id"] for model in ask("/v1/models")["data"]))
            break
        except urllib.error.URLError:
            assert server.poll() is None, "the server has ended"
            time.sleep(0.2)
    for name in ("first", "second"):
        question = {"role": "user", "content": "What is the capital of France?"}
        body = {"model": name, "messages": [question], "max_tokens": 16}
        print(f"{name}: {ask('/v1/chat/completions', body)['choices'][0]['message']['content']}")
    loaded = [model["name"] for model in ask("/api/ps")["models"]]
    print("in memory:", ", ".join(sorted(loaded)))
finally:
    server.terminate()
    server.wait()
