"""What a head learns from: answers of the very model it will draft for, with the hidden states that it will see."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.block_pool import chain_hashes, root_hash
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.llm import LLM
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.errors import ConfigError
from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.decoder import Decoder
from cumulo.models.files.load import load_model
from cumulo.models.heads.tap import StreamTap, eagle_layers
from cumulo.models.play.fused import FusedDecoder
from cumulo.train.head.config import HeadConfig

_AT_ONCE = {"cpu": 16, "cuda": 128}
# Forms and topics are others than those that `cumulo bench speculate` asks.
_FORMS = (
    "Explain {} in simple words.", "Describe {}.", "Summarize what is known about {}.", "What is {}?",
    "Write a paragraph about {}.", "Give me some advice about {}.", "List the advantages of {}.",
    "What are the disadvantages of {}?", "Write a short poem about {}.", "Tell me the history of {}.",
    "How do I get started with {}?", "What are common mistakes people make with {}?", "Write an email about {}.",
    "What is the best way to think about {}?", "Give three examples that have to do with {}.",
    "Why is it useful to know something about {}?", "Write a story for children about {}.",
    "Name five things that everybody should know about {}.", "Why is {} important?", "How does {} work?",
    "Tell me something surprising about {}.", "What do you think of {}?", "Write two sentences about {}.",
    "What questions would a student ask about {}?",
)  # fmt: skip
_TOPICS = (
    "cooking rice", "the solar system", "public speaking", "electric cars", "photosynthesis", "football",
    "painting", "the Roman Empire", "saving money", "learning a language", "machine learning", "sleep",
    "recycling", "tea", "airports", "elephants", "the water cycle", "job interviews", "computer viruses",
    "hiking", "libraries", "bees", "the internet", "farming", "glass", "vaccines", "friendship", "earthquakes",
    "novels", "time management", "kitchens", "wind power", "the human heart", "city planning", "rivers",
    "photography", "cheese", "swimming", "the stock market", "desert animals", "Germany", "Egypt", "Canada",
    "India", "Mexico", "the sun", "the planet Mars", "electricity", "magnets", "light", "summer", "snow",
    "storms", "forests", "lakes", "islands", "cats", "horses", "birds", "butterflies", "sharks", "dinosaurs",
    "trees", "flowers", "oranges", "potatoes", "chocolate", "soup", "pizza", "milk", "salt", "cars",
    "airplanes", "ships", "buses", "roads", "castles", "museums", "schools", "hospitals", "markets",
    "newspapers", "television", "telephones", "computers", "video games", "movies", "dancing", "the guitar",
    "the piano", "singing", "drawing", "poetry", "writing a diary", "mathematics", "chemistry", "history",
    "geography", "medicine", "law", "money", "banks", "taxes", "elections", "democracy", "the family",
    "birthdays", "holidays", "travel", "camping", "running", "tennis", "yoga", "healthy food", "breakfast",
    "cooking for friends", "houses", "furniture", "clothes", "shoes", "gold", "paper", "plastic", "wood",
    "stars", "black holes", "satellites", "the atom", "evolution", "the brain", "memory", "dreams", "happiness",
    "anger",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    tokens: NDArray[np.int32]  # prompt and answer
    prompt_length: int
    stream: NDArray[np.float16]  # [places, features]: what the head sees of the model at the first places


def questions(config: HeadConfig) -> list[str]:
    if config.prompts is not None:
        path = Path(config.prompts)
        if not path.is_file():
            raise ConfigError(f"prompts: there is no file {path}")
        found = [line for line in path.read_text().splitlines() if line.strip()]
    else:
        found = [form.format(topic) for topic in _TOPICS for form in _FORMS]
    np.random.default_rng(config.seed).shuffle(found)
    return [found[index % len(found)] for index in range(config.answers)]


def make_answers(
    config: HeadConfig, engine: EngineConfig, tell: Callable[[str, int, int], None]
) -> list[OwnAnswer]:
    """The model's answers to the questions, a quarter of them and all to repeated questions sampled, with its
    hidden states. They are kept in files and read from there the next time."""
    asked, done = questions(config), list[OwnAnswer]()
    at_once = _AT_ONCE[engine.device]
    firsts = range(0, config.answers, at_once)
    paths = {first: Path(config.folder) / "answers" / f"{first:05d}.npz" for first in firsts}
    if not all(path.is_file() for path in paths.values()):
        with LLM(config.model, config=engine) as llm:
            stream = _streams(config, llm)
            for first, path in paths.items():
                if not path.is_file():
                    _answer(config, llm, stream, asked, range(first, min(first + at_once, len(asked))), path)
                tell("the model answers", min(first + at_once, config.answers), config.answers)
    for path in paths.values():
        done += _read(path)
    return done[: config.answers]


def _streams(config: HeadConfig, llm: LLM) -> Callable[[NDArray[np.int32]], Tensor]:
    """From tokens to the hidden states at as many places as are known: tapped while the answer was made; where the
    engine cannot be tapped, computed again."""
    runner, spec = llm.engine.runner, llm.spec
    if isinstance(runner, TorchRunner) and isinstance(runner.model, (Decoder, FusedDecoder)):
        slots = runner.cache.blocks * runner.cache.block_size
        tap = runner.model.tap = StreamTap(
            eagle_layers(spec.layers), slots, spec.hidden, torch.float32, "cpu"
        )
        return lambda tokens: _tapped(llm, tap, tokens)
    decoder = load_model(config.model, device="cuda", keep_quantised=False, with_tokenizer=False).decoder
    decoder.rotary.serve(llm.max_context)
    return lambda tokens: _computed(decoder, tokens)


def _answer(
    config: HeadConfig,
    llm: LLM,
    stream: Callable[[NDArray[np.int32]], Tensor],
    asked: list[str],
    group: range,
    path: Path,
) -> None:
    distinct = len(set(asked))  # they are asked in turn: the others repeat them
    params = [
        SamplingParams(
            temperature=0.8 if index % 4 == 3 or index >= distinct else 0.0,
            max_tokens=config.answer_tokens,
            seed=index,
        )
        for index in group
    ]
    outputs = llm.chat([[{"role": "user", "content": asked[index]}] for index in group], params)
    tokens = [np.array(one.prompt_token_ids + one.samples[0].token_ids, dtype=np.int32) for one in outputs]
    streams = [stream(one).to(torch.float16).cpu().numpy() for one in tokens]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez(
        part, tokens=np.concatenate(tokens), sizes=[len(one) for one in tokens], stream=np.concatenate(streams),
        places=[len(one) for one in streams], prompts=[len(one.prompt_token_ids) for one in outputs],
    )  # fmt: skip
    part.replace(path)


def _tapped(llm: LLM, tap: StreamTap, tokens: NDArray[np.int32]) -> Tensor:
    """The blocks of the tokens are still in the prefix cache, the last excepted."""
    pool = llm.engine.scheduler.pool
    size = pool.block_size
    full = (len(tokens) - 1) // size
    hashes = chain_hashes(root_hash(""), array("i", tokens[: full * size].tolist()), size)
    blocks = torch.tensor(pool.cached_prefix(hashes), dtype=torch.int64)
    return tap.at((blocks[:, None] * size + torch.arange(size)).flatten())


@torch.inference_mode()
def _computed(decoder: Decoder, tokens: NDArray[np.int32]) -> Tensor:
    spec, device, count = decoder.spec, decoder.final_norm.weight.device, len(tokens) - 1
    tap = decoder.tap = StreamTap(eagle_layers(spec.layers), count, spec.hidden, decoder.dtype, device)
    cache = KVCache(spec, 1, count, decoder.dtype, device)
    places = torch.arange(count, device=device)
    decoder.forward(one_sequence(torch.from_numpy(tokens[:-1].astype(np.int64)).to(device), places), cache)
    return tap.kept


def one_sequence(tokens: Tensor, places: Tensor) -> ForwardBatch:
    """A step that computes one whole sequence, in a cache of one block."""

    def small(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=places.device)

    return ForwardBatch(
        token_ids=tokens, positions=places, slots=places, query_starts=small(0, len(places)),
        context_lengths=small(len(places)), block_tables=small(0)[None], logit_rows=places[-1:],
    )  # fmt: skip


def _read(path: Path) -> list[OwnAnswer]:
    with np.load(path) as file:
        tokens = np.split(file["tokens"], np.cumsum(file["sizes"])[:-1])
        streams = np.split(file["stream"], np.cumsum(file["places"])[:-1])
        return [OwnAnswer(*one) for one in zip(tokens, file["prompts"].tolist(), streams, strict=True)]
