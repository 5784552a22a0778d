"""The same model, calibration text and recipe quantised by llm-compressor and by Cumulo: growth of perplexity over
the 16-bit model, as a ratio, and whether each reads the other's folder.

    python benchmarks/quantisation_peers.py work --methods gptq,awq --sequences 16 --length 256

Folders that are in `work` already are used again. llm-compressor (with compressed-tensors) must be importable; it
pins other versions of transformers than Cumulo's tests use, so install it into an environment of its own:
`pip install --no-deps llmcompressor compressed-tensors` and what it then asks for.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cumulo.base.reference_text import reference_text
from cumulo.base.report import Row, write_json
from cumulo.bench.quantised import QualityConfig, measure
from cumulo.models.files import names_huggingface
from cumulo.models.files.parameter_reader import ParameterReader
from cumulo.quant.decide.recipe import Recipe, settled
from cumulo.quant.play.folder import write_tokenizer
from cumulo.quant.play.run import Calibration, calibration_tokens, quantise
from cumulo.spec.to_huggingface import config_from_spec

MUST = 1.1  # growth of perplexity, ours over theirs


def plain_folder(model: str | None, folder: Path) -> Path:
    """The model in 16 bits as a Hugging Face folder, which llm-compressor reads."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    reader = ParameterReader(model)
    whole: dict[str, torch.Tensor] = {}
    tensors = {}
    for one in names_huggingface.placements(reader.spec):
        if one.target not in whole:
            whole = {one.target: reader.read(one.target)}
        tensors[one.source] = one.region(whole[one.target]).to(torch.float16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, reader.tokenizer())
    config = config_from_spec(reader.spec) | {"dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def by_llm_compressor(source: Path, folder: Path, recipe: Recipe, tokens: torch.Tensor) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.quantization import GPTQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Their AWQ pins memory, which torch refuses without an accelerator.
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_, **__: None
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    weights = {
        "num_bits": recipe.bits, "type": "int", "symmetric": recipe.symmetric, "strategy": "group",
        "group_size": recipe.group,
    }  # fmt: skip
    if recipe.method == "gptq":
        weights["actorder"] = "static"
    targets = ["Linear"]
    if recipe.layers is not None:
        targets = [f"re:.*layers\\.{layer}\\..*_proj$" for layer in range(recipe.layers)]
    scheme: Any = {"group_0": {"targets": targets, "weights": weights}}
    kind = GPTQModifier if recipe.method == "gptq" else AWQModifier
    data = Dataset.from_dict(
        {"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()}
    )
    oneshot(
        model=model,
        dataset=data,
        recipe=[kind(config_groups=scheme, ignore=["lm_head"])],
        max_seq_length=tokens.shape[1],
        num_calibration_samples=len(tokens),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(folder, save_compressed=True)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder for models and results")
    parser.add_argument("--model", default=None, help="default: the built-in model")
    parser.add_argument("--methods", default="gptq,awq")
    parser.add_argument("--sequences", type=int, default=64, help="calibration sequences")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--layers", type=int, help="quantise only the first so many")
    parser.add_argument("--held-out", type=int, default=32, help="sequences of 256 tokens that are measured")
    parser.add_argument("--only", choices=["theirs", "ours", "measure"], help="one part of the work")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    source = plain_folder(options.model, options.work / "plain")
    reader = ParameterReader(source)
    folders: dict[str, list[Path]] = {}
    for method in options.methods.split(","):
        recipe = settled(Recipe(method, layers=options.layers), reader.spec)
        text = reference_text("calibration")
        tokens = calibration_tokens(reader.tokenizer(), text, options.sequences, options.length)
        ours, theirs = (options.work / f"{method}-{who}" for who in ("ours", "theirs"))
        folders[method] = [ours, theirs]
        if options.only in (None, "theirs") and not (theirs / "config.json").is_file():
            by_llm_compressor(source, theirs, recipe, tokens)
        if options.only in (None, "ours") and not ours.exists():
            quantise(source, ours, recipe, Calibration(None, options.sequences, options.length))
    if options.only in ("theirs", "ours"):
        return
    every = tuple(folder for pair in folders.values() for folder in pair)
    config = QualityConfig((), every, sequences=options.held_out, rounds=1)
    found = measure(str(source), config, lambda stage, done, total: print(stage, flush=True))
    plain, by_name = found[0].perplexity, {one.name: one for one in found[1:]}
    rows = [
        Row(f"{one.name}: perplexity", one.perplexity, "", "lower", note=f"KL {one.kl:.4f}") for one in found
    ]
    for method, pair in folders.items():
        growth = [by_name[folder.name].perplexity - plain for folder in pair]
        rows.append(
            Row(
                f"{method}: growth of perplexity, ours / theirs",
                growth[0] / growth[1],
                "",
                "lower",
                must=MUST,
            )
        )
    for row in rows:
        print(f"{row.name:52} {row.value:.4f}  {row.note}{'' if row.ok else '  misses must'}")
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
