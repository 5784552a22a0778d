"""Put the figures of `results/gpu.json` into docs/gpu.md as a table: `python benchmarks/gpu_table.py`."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def table(report: dict) -> str:
    machine = report["machine"]
    lines = [
        f"{machine['date']}, {machine['gpu']}, torch {machine['torch']}, Triton {machine.get('triton', '')};"
        f" ceilings in the same run: copy {machine['copy_tb_s']} TB/s, bf16 {machine['bf16_tflop_s']} and fp8 "
        f"{machine['fp8_tflop_s']} TFLOP/s.", "",
        "| | unit | Cumulo | vLLM 0.26 | roofline |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in report["rows"]:
        if "value" not in row:
            continue
        share = f"{row['roofline_percent']:.0f}%" if row.get("roofline_percent") else ""
        cells = (row["name"], row["unit"], f"**{number(row['value'])}**", number(row.get("vllm")), share)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    page = ROOT / "docs" / "gpu.md"
    text = page.read_text()
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1] if END in rest else rest
    made = table(json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text()))
    page.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")


if __name__ == "__main__":
    main()
