"""Adapters leave a run in PEFT's layout, too: `peft` loads them, and they compute what the merged model does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cumulo.layout.layout import Layout
from cumulo.train.decide.config import LoraConfig, ModelConfig
from cumulo.train.run.trainer import Trainer
from tests.train.ranked import tiny, write_texts


@pytest.mark.long
def test_peft_loads_the_adapter_and_computes_what_the_merged_model_does(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    source = write_texts(tmp_path / "texts.jsonl")
    base = Trainer(replace(tiny(tmp_path / "base", source, Layout()), steps=3)).run().model_folder
    lora, start = LoraConfig(rank=3, alpha=5.0), ModelConfig(start_from=str(base))
    result = Trainer(tiny(tmp_path / "adapted", source, Layout(), lora=lora, model=start, steps=4)).run()
    assert result.adapter_folder is not None
    about = json.loads((result.adapter_folder / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["base_model_name_or_path"]) == (3, 5.0, str(base))

    tokens = torch.arange(2, 14)[None]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    merged = AutoModelForCausalLM.from_pretrained(result.model_folder, dtype=torch.float64)
    with torch.no_grad():
        before, expected = plain(tokens).logits, merged(tokens).logits
        adapted = peft.PeftModel.from_pretrained(plain, str(result.adapter_folder)).to(torch.float64)
        found = adapted(tokens).logits
    assert (before - expected).abs().max() > 1e-3  # it has learnt something
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_run_without_adapters_exports_none(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "texts.jsonl")
    result = Trainer(replace(tiny(tmp_path / "plain", source, Layout()), steps=3)).run()
    assert result.adapter_folder is None and not (tmp_path / "plain" / "adapter").exists()
