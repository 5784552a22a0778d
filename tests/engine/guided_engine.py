"""A whole engine on a tiny random model that writes bytes, for tests of guided decoding."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tokenizers
import torch

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.engine import Engine
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder
from cumulo.models.text.tokenizer import Tokenizer, byte_alphabet
from tests.engine.equivalence import FreeDrafts
from tests.engine.tiny_engine import SPECS, run

_SPELLING = {byte: character for character, byte in byte_alphabet().items()}
# Every byte, pieces that span several JSON tokens, a special token.
_TEXTS = [bytes([byte]) for byte in range(256)] + [
    b'{"', b'"}', b'":', b'": "', b'", "', b" the", b"true", b"false", b"null", b"}}", b"10", b"\n  ", "é".encode(),
]  # fmt: skip
SPECIAL = len(_TEXTS)
EOS = SPECIAL + 1
VOCAB = EOS + 3  # the model has a logit or two more than there are tokens


def make_tokenizer(special: str = "<|mark|>") -> Tokenizer:
    specials = [special, "<|end|>"]
    pieces = ["".join(_SPELLING[byte] for byte in text) for text in _TEXTS] + specials
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens(specials)
    return Tokenizer(
        backend, kind="byte_level", pieces=pieces, added_ids=(SPECIAL, EOS), special_ids=(SPECIAL, EOS),
        eos_ids=(EOS,),
    )  # fmt: skip


TOKENIZER = make_tokenizer()
GUIDANCE = Guidance(TOKENIZER, VOCAB, (EOS,))


def make_decoder() -> Decoder:
    decoder = Decoder(
        replace(SPECS["dense"], vocab_size=VOCAB, eos_token_ids=(EOS,), max_context=2048), torch.float64
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in decoder.parameters():
        offset = 0.0 if parameter.dim() > 1 else 1.0
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = offset + 0.2 * noise
    return decoder


DECODER = make_decoder()
# A random model is as likely to write any byte; what closes brackets and strings needs a push.
CLOSING = {token: 3.5 for token, text in enumerate(_TEXTS) if text in (b'"', b"}", b"]", b'"}', b"}}")}


def make_engine(
    *, blocks: int = 2000, overlap: bool = False, guidance: Guidance | None = GUIDANCE, **options
) -> Engine:
    defaults = dict(block_size=16, max_context=1024, max_running=64, max_tokens_per_step=512)
    config = SchedulerConfig(blocks=blocks, **{**defaults, **options})
    cache = KVCache(DECODER.spec, config.blocks, config.block_size, torch.float64)
    runner = TorchRunner(
        DECODER, cache, max_slots=config.max_running, max_context=config.max_context, eos_token_ids=(EOS,),
        host_blocks=config.tier_blocks, overlap=overlap, guidance=guidance,
    )  # fmt: skip
    return Engine(
        Scheduler(config), runner, TOKENIZER if guidance else None, vocab_size=VOCAB, eos_ids=(EOS,),
        overlap=overlap, guidance=guidance,
    )  # fmt: skip


PROMPT = [40, 41, 42]


def guide_of(schema: Any) -> Guide:
    return Guide("json_schema", json.dumps(schema))


def answers(requests: Mapping[str, SamplingParams], **options):
    engine = make_engine(**options)
    if engine.scheduler.speculation is not None:
        engine.scheduler.speculation.cost = FreeDrafts()
    for name, params in requests.items():
        engine.add(PROMPT, params, request_id=name)
    outputs = run(engine)
    engine.runner.close()
    return outputs


def tokens_of(outputs):
    return {
        name: [(s.token_ids, s.finish_reason) for s in output.samples] for name, output in outputs.items()
    }
