"""A load test with guidellm, by both of its request formats: `python guidellm_client.py URL MODEL`, results as
JSON. No imports of ours: it runs in the clients' own environment."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1:3]
COUNT, TOKENS = 4, 8
results: dict[str, object] = {}
with tempfile.TemporaryDirectory() as folder:
    prompts, report = Path(folder, "prompts.jsonl"), Path(folder, "report.json")
    prompts.write_text("\n".join(json.dumps({"prompt": f"Count to {number}."}) for number in range(8)))
    for kind in ("/v1/chat/completions", "/v1/completions"):
        subprocess.run(
            [
                Path(sys.executable).with_name("guidellm"), "run", "--disable-console",
                "--backend", f"kind=openai_http,target={URL.removesuffix('/v1')},model={MODEL},"
                f"max_tokens={TOKENS},request_format={kind}",
                "--data", f"kind=json_file,path={prompts}",
                "--profile", "kind=concurrent,streams=2",
                "--constraint", f"kind=max_requests,count={COUNT}",
                "--output", f"kind=json,path={report}",
            ],
            check=True, stdout=sys.stderr,
        )  # fmt: skip
        measured = json.loads(report.read_text())["benchmarks"][0]["metrics"]
        results[kind] = {
            "requests": measured["request_totals"],
            "output_tokens": measured["output_token_count"]["successful"]["mean"],
            "first_token_ms": measured["time_to_first_token_ms"]["successful"]["mean"],
        }
print(json.dumps(results))
