"""Quantize the first layer of the built-in model to 4 bits and ask the result. All layers: leave out `layers`."""

import tempfile
from pathlib import Path

from cumulo import LLM, SamplingParams
from cumulo.quant.decide.recipe import Recipe
from cumulo.quant.play.run import Calibration, quantise

with tempfile.TemporaryDirectory() as work:
    recipe = Recipe("gptq", bits=4, layers=1)
    report = quantise(None, Path(work) / "smollm2-gptq", recipe, Calibration(sequences=4, length=64))
    print(f"{report.recipe.in_words}: {report.weight_bytes / 2**20:.0f} MiB")
    with LLM(str(report.folder)) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        print(llm.chat(question, SamplingParams(temperature=0, max_tokens=24))[0].samples[0].text)
