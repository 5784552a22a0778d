"""What a head learns from: answers of the very model it will draft for; on a CPU with the hidden states that it
will see, which the engine had to compute anyway."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from cumulo.models.decoder import Decoder
from cumulo.models.heads.tap import StreamTap, eagle_layers
from cumulo.models.play.fused import FusedDecoder
from cumulo.train.head.config import OWN_QUESTIONS, HeadConfig

_AT_ONCE = {"cpu": 16, "cuda": 2048}
_OWN_QUESTION_TOKENS = 48  # of which a question has at most so many
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
    stream: (
        NDArray[np.float16] | None
    )  # [places, features]: what the head sees of the model at the first places


def questions(config: HeadConfig, own: Callable[[int], list[str]]) -> list[str]:
    """As many as answers are wanted, from a file or the built-in ones, asked again and again; `own` makes more that
    are all different, if the configuration wants those."""
    if config.prompts not in (None, OWN_QUESTIONS):
        path = Path(config.prompts)
        if not path.is_file():
            raise ConfigError(f"prompts: there is no file {path}")
        found = [line for line in path.read_text().splitlines() if line.strip()]
    else:
        found = [form.format(topic) for topic in _TOPICS for form in _FORMS]
        if config.prompts is not None and config.answers > len(found):
            found += own(config.answers - len(found))
    np.random.default_rng(config.seed).shuffle(found)
    return [found[index % len(found)] for index in range(config.answers)]


def own_questions(llm: LLM, count: int, seed: int) -> list[str]:
    """What the model expects people to ask: it continues its chat template where a user's words would begin
    (Magpie, Xu et al. 2024). About as many as wanted: some are no questions, or were asked before."""
    mark = "\u2063"  # a character that no template has
    begin, _, _ = llm.tokenizer.apply_chat_template([{"role": "user", "content": mark}]).partition(mark)
    params = [
        SamplingParams(
            temperature=1.0, top_p=0.95, max_tokens=_OWN_QUESTION_TOKENS, seed=seed + index, stop="\n"
        )
        for index in range(count)
    ]
    outputs = llm.generate([llm.tokenizer.encode(begin)] * count, params)
    found = (one.samples[0] for one in outputs)
    texts = (one.text.strip() for one in found if one.finish_reason == "stop")
    return list(dict.fromkeys(text for text in texts if len(text.split()) > 2))


def make_answers(
    config: HeadConfig, engine: EngineConfig, tell: Callable[[str, int, int], None]
) -> list[OwnAnswer]:
    """The model's answers to the questions, a quarter of them and all to repeated questions sampled. They are kept
    in files and read from there the next time."""
    done = list[OwnAnswer]()
    at_once = _AT_ONCE[engine.device]
    firsts = range(0, config.answers, at_once)
    paths = {first: Path(config.folder) / "answers" / f"{first:05d}.npz" for first in firsts}
    if not all(path.is_file() for path in paths.values()):
        with LLM(config.model, config=engine) as llm:
            stream = _streams(llm)

            def own(count: int) -> list[str]:
                tell("the model asks itself", 0, count)
                return own_questions(llm, count, config.seed)

            asked = questions(config, own)
            for first, path in paths.items():
                if not path.is_file():
                    _answer(config, llm, stream, asked, range(first, min(first + at_once, len(asked))), path)
                tell("the model answers", min(first + at_once, config.answers), config.answers)
    for path in paths.values():
        done += _read(path)
    return done[: config.answers]


def _streams(llm: LLM) -> Callable[[NDArray[np.int32]], Tensor] | None:
    """From tokens to the hidden states at as many places as are known, tapped while the answer was made; None where
    the engine cannot be tapped: then they are computed again."""
    runner, spec = llm.engine.runner, llm.spec
    if not isinstance(runner, TorchRunner) or not isinstance(runner.model, (Decoder, FusedDecoder)):
        return None
    slots = runner.cache.blocks * runner.cache.block_size
    tap = runner.model.tap = StreamTap(eagle_layers(spec.layers), slots, spec.hidden, torch.float32, "cpu")
    return lambda tokens: _tapped(llm, tap, tokens)


def _answer(
    config: HeadConfig,
    llm: LLM,
    stream: Callable[[NDArray[np.int32]], Tensor] | None,
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
    kept: dict[str, Any] = {}
    if stream is not None:
        streams = [stream(one).to(torch.float16).cpu().numpy() for one in tokens]
        kept = {"stream": np.concatenate(streams), "places": [len(one) for one in streams]}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez(
        part, tokens=np.concatenate(tokens), sizes=[len(one) for one in tokens],
        prompts=[len(one.prompt_token_ids) for one in outputs], **kept,
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


def _read(path: Path) -> list[OwnAnswer]:
    with np.load(path) as file:
        tokens = np.split(file["tokens"], np.cumsum(file["sizes"])[:-1])
        streams: list[NDArray[np.float16] | None] = [None] * len(tokens)
        if "stream" in file:
            streams = list(np.split(file["stream"], np.cumsum(file["places"])[:-1]))
        return [OwnAnswer(*one) for one in zip(tokens, file["prompts"].tolist(), streams, strict=True)]
