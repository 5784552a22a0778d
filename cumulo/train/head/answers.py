"""What a head learns from: answers of the very model it will draft for, which a Writer gives, many at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cumulo.errors import ConfigError
from cumulo.models.files.load import LoadedModel
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.train.head.config import OWN_QUESTIONS, HeadConfig
from cumulo.train.head.prompts import AskedTurns, Grammar
from cumulo.train.head.writer import Draw, Writer

_OWN_QUESTION_TOKENS = 64  # of which a question has at most so many
_GREEDY, _SAMPLED, _ASKED = Draw(), Draw(0.8, 0.95), Draw(1.0, 0.95)
_SAMPLED_EVERY = 8  # one answer of so many is sampled

Tell = Callable[[str, int, int], None]  # what, done, of
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    tokens: NDArray[np.int32]  # prompt and answer
    prompt_length: int


def conversations(config: HeadConfig, own: Callable[[int], list[str]]) -> list[AskedTurns]:
    """Conversations, as many as answers are wanted: lines of a file, asked again and again, or built-in ones;
    `own` makes half of them, if the configuration wants that."""
    if config.prompts not in (None, OWN_QUESTIONS):
        found = [AskedTurns((line,)) for line in prompt_lines(config.prompts)]
    else:
        asked = [] if config.prompts is None else own(config.answers // 2)
        found = [AskedTurns((text,)) for text in asked]
        found += Grammar(config.seed).conversations(config.answers - len(found))
    np.random.default_rng(config.seed).shuffle(found)
    return [found[index % len(found)] for index in range(config.answers)]


def prompt_lines(name: str) -> list[str]:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"there is no file {path} with prompts")
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{path} has no prompts: it needs one per line")
    return lines


def own_questions(tokenizer: Tokenizer, writer: Writer, count: int, tell: Tell) -> list[str]:
    """What the model expects people to ask: it continues its chat template where a user's words would begin
    (Magpie, Xu et al. 2024). About as many as wanted: some are no questions, or were asked before."""
    mark = "\u2063"  # a character that no template has
    begin, _, _ = tokenizer.apply_chat_template([{"role": "user", "content": mark}]).partition(mark)
    prompt = tokenizer.encode(begin)
    written = writer.write(
        [prompt] * count, _OWN_QUESTION_TOKENS, [_ASKED] * count,
        lambda done: tell("the model asks itself", done, count),
    )  # fmt: skip
    texts = []
    for one in written:
        text, line_ended, _ = tokenizer.decode(one).strip().partition("\n")
        if line_ended or len(one) < _OWN_QUESTION_TOKENS:
            texts.append(text.strip())
    return list(dict.fromkeys(text for text in texts if len(text.split()) > 2))


def write_answers(config: HeadConfig, model: LoadedModel, tell: Tell) -> list[OwnAnswer]:
    """They are kept in a file and read from there the next time."""
    path = Path(config.folder) / "answers" / "written.npz"
    if path.is_file():
        return _read(path)[: config.answers]
    assert model.tokenizer is not None
    tokenizer, writer = model.tokenizer, Writer(model.decoder, model.eos_ids, seed=config.seed)
    asked = conversations(config, lambda count: own_questions(tokenizer, writer, count, tell))
    answers = answered(config, tokenizer, writer, asked, tell)
    _save(path, answers)
    return answers


def answered(
    config: HeadConfig, tokenizer: Tokenizer, writer: Writer, asked: Sequence[AskedTurns], tell: Tell,
    sampled_every: int = _SAMPLED_EVERY,
) -> list[OwnAnswer]:  # fmt: skip
    """The answers to the conversations' last turns; those before are greedy ones."""
    messages = [_begun(one) for one in asked]
    prompts = [_rendered(tokenizer, one) for one in messages]
    longer = [index for index, one in enumerate(asked) if len(one.turns) > 1]
    firsts = writer.write(
        [prompts[index] for index in longer], config.answer_tokens, [_GREEDY] * len(longer),
        lambda done: tell("the model answers first turns", done, len(longer)),
    )  # fmt: skip
    for index, tokens in zip(longer, firsts, strict=True):
        messages[index] = _continued(messages[index], tokenizer.decode(tokens), asked[index].turns[1])
        prompts[index] = _rendered(tokenizer, messages[index])
    draws = [
        _SAMPLED if index % sampled_every == sampled_every - 1 else _GREEDY for index in range(len(prompts))
    ]
    written = writer.write(
        prompts, config.answer_tokens, draws, lambda done: tell("the model answers", done, len(prompts))
    )
    return [
        OwnAnswer(np.array(prompt + answer, dtype=np.int32), len(prompt))
        for prompt, answer in zip(prompts, written, strict=True)
    ]


def _rendered(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    return list(tokenizer.render_chat(messages)[1])


def _begun(conversation: AskedTurns) -> Messages:
    told = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    return [*told, {"role": "user", "content": conversation.turns[0]}]


def _continued(messages: Messages, answer: str, turn: str) -> Messages:
    """With an answer, up to its last whole sentence, and what the user says to it."""
    end = max(answer.rfind(mark) for mark in ".!?")
    said = answer[: end + 1] if end > 0 else answer
    return [*messages, {"role": "assistant", "content": said.strip()}, {"role": "user", "content": turn}]


def _save(path: Path, answers: Sequence[OwnAnswer]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez(
        part, tokens=np.concatenate([one.tokens for one in answers]), sizes=[len(one.tokens) for one in answers],
        prompts=[one.prompt_length for one in answers],
    )  # fmt: skip
    part.replace(path)


def _read(path: Path) -> list[OwnAnswer]:
    with np.load(path) as file:
        tokens = np.split(file["tokens"], np.cumsum(file["sizes"])[:-1])
        return [OwnAnswer(*one) for one in zip(tokens, file["prompts"].tolist(), strict=True)]
