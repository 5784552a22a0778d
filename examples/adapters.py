"""One model, two adapters, one batch: each prompt is answered with the adapter it names.

python examples/adapters.py                       # two random adapters of the built-in model, made here
python examples/adapters.py runs/chat/adapter     # adapters that `cumulo train` or PEFT has written
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from cumulo import LLM, SamplingParams


def make_adapter(folder: Path, seed: int, rank: int = 8) -> Path:
    """A random adapter of SmolLM2-135M's query and value projections, in PEFT's layout."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(30):
        for name, outputs in (("q_proj", 576), ("v_proj", 192)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, 576, generator=generator) / 24
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 10
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


with tempfile.TemporaryDirectory() as made:
    given = [Path(argument) for argument in sys.argv[1:]]
    folders = given or [make_adapter(Path(made) / f"random-{seed}", seed) for seed in (1, 2)]
    adapters = {f"{number}-{folder.name}": folder for number, folder in enumerate(folders, 1)}
    with LLM(lora=adapters) as llm:
        names = [None, *adapters]
        prompt, params = "The capital of France is", SamplingParams(temperature=0, max_tokens=12)
        for name, output in zip(
            names, llm.generate([prompt] * len(names), params, adapter=names), strict=True
        ):
            print(f"{name or 'the model itself'}: {output.text!r}")
        print(f"adapters take {llm.ledger['adapters'].measured / 1e6:.1f} MB")
