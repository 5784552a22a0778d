"""The multi-token-prediction module of a tiny DeepSeek-V3, next to transformers' own layer, and in an engine."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.play.draft_source import DraftSource, attach_draft
from cumulo.errors import ConfigError
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder
from cumulo.models.files.weights_safetensors import load_safetensors
from cumulo.models.heads.mtp import load_mtp
from cumulo.spec.from_huggingface import spec_from_config
from tests.engine.tiny_engine import VOCAB, make_engine, run
from tests.models import tiny
from tests.models.sequences import one_sequence

PROMPT = [token % VOCAB for token in tiny.prompt(40, seed=3)]
LAYERS = 3  # of the model; the one behind them becomes its module


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model of one layer more than it says, whose last layer is the module, as DeepSeek publishes it."""
    folder = tmp_path_factory.mktemp("mtp")
    whole = tiny.save("deepseek_v3", folder, num_hidden_layers=LAYERS + 1, vocab_size=VOCAB)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(5)
    hidden, source = config["hidden_size"], f"model.layers.{LAYERS}"
    extra = {
        f"{source}.enorm.weight": torch.rand(hidden) + 0.5,
        f"{source}.hnorm.weight": torch.rand(hidden) + 0.5,
        f"{source}.eh_proj.weight": torch.randn(hidden, 2 * hidden) * hidden**-0.5,
        f"{source}.shared_head.norm.weight": torch.rand(hidden) + 0.5,
        f"{source}.shared_head.head.weight": torch.randn(config["vocab_size"], hidden) * hidden**-0.5,
    }
    file = folder / "model.safetensors"
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    return folder, whole, {name.removeprefix(f"{source}."): tensor for name, tensor in extra.items()}


def normed(x, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5)


@torch.no_grad()
def reference(whole, extra, tokens, states):
    """Logits at every place, from hidden states there and the tokens behind them."""
    model = whole.model
    embedded = model.embed_tokens(tokens[None])
    embedded[:, 0] = 0
    assert whole.config.rms_norm_eps == 1e-5
    both = torch.cat((normed(embedded, extra["enorm.weight"]), normed(states, extra["hnorm.weight"])), -1)
    x = both @ extra["eh_proj.weight"].T
    count = len(tokens)
    places = torch.arange(count)[None]
    mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
    x = model.layers[LAYERS](
        x, attention_mask=mask, position_ids=places, position_embeddings=model.rotary_emb(x, places)
    )
    x = x[0] if isinstance(x, tuple) else x
    return (normed(x, extra["shared_head.norm.weight"]) @ extra["shared_head.head.weight"].T)[0]


def test_the_module_computes_what_transformers_layer_does(saved):
    folder, whole, extra = saved
    spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    head = load_mtp(folder, spec)
    tokens = torch.tensor(PROMPT)
    torch.manual_seed(7)
    states = torch.randn(1, len(PROMPT), spec.hidden)
    expected = reference(whole, extra, tokens, states)
    places = torch.arange(len(PROMPT))
    batch = one_sequence(tokens, places)
    batch.logit_rows = places
    embedded = whole.model.embed_tokens(tokens).detach()
    with torch.no_grad():
        actual = head.logits(head(states[0], embedded, batch, KVCache(head.spec, 1, len(PROMPT))))
    assert expected.std() > 0.5
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0)


def test_an_engine_that_drafts_with_the_module_says_the_same(saved):
    folder, _, _ = saved
    spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    decoder = Decoder(spec, torch.float64)
    load_safetensors(folder, decoder, spec)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens = []
    for speculate in ("", "model"):
        engine = make_engine(decoder, blocks=64, speculate=speculate)
        if speculate:
            attach_draft(
                DraftSource("mtp", spec, head=load_mtp(folder, spec, dtype=torch.float64)),
                engine.runner,
                decoder,
            )
            engine.scheduler.speculation.fixed_count = 2
        engine.add(PROMPT, greedy, request_id="r")
        output = run(engine)["r"]
        tokens.append(output.samples[0].token_ids)
    assert tokens[0] == tokens[1]
    assert output.story.drafted_tokens > 20
    assert decoder.tap is not None and decoder.tap.kept.abs().sum() > 0


def test_a_model_without_a_module_is_refused_by_name(tmp_path):
    tiny.save("deepseek_v3", tmp_path)
    spec = spec_from_config(json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(ConfigError, match="speculate=mtp needs a folder with a multi-token-prediction layer"):
        load_mtp(Path(tmp_path), spec)
