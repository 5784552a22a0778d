"""ITL of running answers while long prompts arrive: two engines that do both, or one for prefill and one to decode.

    python benchmarks/split_roles.py                       # the built-in model, one thread for each engine

The same load on two servers, one after the other: a few clients read long answers while long prompts come in.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx

from cumulo.base.report import Row, write_json

WAYS = {"2 engines for both": ("--replicas", "2"), "1 prefill, 1 decode": ("--prefill", "1", "--decode", "1")}
SENTENCE = "The river runs past the old mill and the bridge where the children used to fish in summer. "


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--readers", type=int, default=4, help="clients that read long answers")
    parser.add_argument("--answer", type=int, default=200, help="tokens of each of their answers")
    parser.add_argument("--prompts", type=int, default=12, help="long prompts that arrive meanwhile")
    parser.add_argument("--every-s", type=float, default=3.0)
    parser.add_argument("--sentences", type=int, default=60, help="of a long prompt, about 20 tokens each")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows: list[Row] = []
    for way, options in WAYS.items():
        rows += _measure(way, options, chosen)
    if chosen.json:
        write_json(chosen.json, rows)
    for row in rows:
        print(f"{row.name:44} {row.value:10.1f} {row.unit}")


def _measure(way: str, options: tuple[str, ...], chosen: argparse.Namespace) -> list[Row]:
    command = [sys.executable, "-m", "cumulo.cli", "serve", "--port", "0", "--threads", "1", "--no-console"]
    command += ["--kv-memory-gib", "0.5", *options, *([chosen.model] if chosen.model else [])]
    with tempfile.NamedTemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = _ready(Path(log.name), 2 if way.startswith("2") else 1)
            return _load(url, way, chosen)
        finally:
            server.terminate()
            server.wait()


def _ready(log: Path, replicas: int) -> str:
    """Until every engine is there, the prefill engine included."""
    client = httpx.Client()
    while True:
        time.sleep(0.2)
        found = re.search(r"listening on (http://\S+);", log.read_text())
        if found is None:
            continue
        try:
            fleet = client.get(f"{found[1]}/v1/fleet", timeout=5).json()
        except (httpx.HTTPError, ValueError):
            continue
        ready = [one for one in fleet.get("replicas", ()) if one["state"] == "ready"]
        lonely = [one for one in ready if one["transfers"] and not one["transfers"]["prefill_engines"]]
        if len(ready) == replicas and not lonely:
            return str(found[1])


def _load(url: str, way: str, chosen: argparse.Namespace) -> list[Row]:
    itl_s: list[float] = []
    ttft_s: list[float] = []
    stop, lock = threading.Event(), threading.Lock()

    def read_answers(number: int) -> None:
        client = httpx.Client(timeout=600)
        while not stop.is_set():
            _, between = _ask(client, url, f"{number} Tell a long story.", chosen.answer)
            with lock:
                itl_s.extend(between)

    readers = [threading.Thread(target=read_answers, args=(number,)) for number in range(chosen.readers)]
    for reader in readers:
        reader.start()
    client = httpx.Client(timeout=600)
    threads = []
    for number in range(chosen.prompts):
        time.sleep(chosen.every_s)
        text = f"{number} " + SENTENCE * chosen.sentences
        threads.append(
            threading.Thread(target=lambda text=text: ttft_s.append(_ask(client, url, text, 2)[0]))
        )
        threads[-1].start()
    for thread in threads:
        thread.join()
    stop.set()
    for reader in readers:
        reader.join()
    itl_s.sort()
    ttft_s.sort()
    return [
        Row(f"{way}: ITL p50", 1e3 * itl_s[len(itl_s) // 2], "ms", "lower"),
        Row(f"{way}: ITL p99", 1e3 * itl_s[int(0.99 * len(itl_s))], "ms", "lower"),
        Row(f"{way}: ITL max", 1e3 * itl_s[-1], "ms", "lower"),
        Row(f"{way}: TTFT of long prompts, p50", 1e3 * ttft_s[len(ttft_s) // 2], "ms", "lower"),
        Row(f"{way}: tokens read", len(itl_s), "", "higher"),
    ]


def _ask(client: httpx.Client, url: str, prompt: str, tokens: int) -> tuple[float, list[float]]:
    """TTFT, and the time between tokens."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["model"] = client.get(f"{url}/v1/models").json()["data"][0]["id"]
    times = [time.perf_counter()]
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(time.perf_counter())
    return times[1] - times[0], [after - before for before, after in pairwise(times[1:])]


if __name__ == "__main__":
    main()
