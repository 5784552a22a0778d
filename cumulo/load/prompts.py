"""The words of synthetic prompts: as many tokens as planned, never the same twice, the same for a seed. Pure.

Short common words are one token each in nearly every vocabulary; `Ruler` corrects for the rest, measured
by the probe. Called by the player when a request is due.
"""

import random
from dataclasses import dataclass

# One token each with a leading space in the usual BPE vocabularies.
_PROSE = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she "
    "many some so these would other into has more her two like him see time could no make than first been its "
    "who now people my made over did down only way find use may water long little very after words called just "
    "where most know get through back much before go good new write our used me man too any day same right "
    "look think also around another came come work three word must because does part even place well such here "
    "take why things help put years different away again off went old number great tell men say small every "
    "found still between name should home big give air line set own under read last never us left end along "
    "while might next sound below saw something thought both few those always looked show large often together "
    "asked house world going want school important until form food keep children feet land side without boy "
    "once animals life enough took sometimes four head above kind began almost live page got earth need far "
    "hand high year mother light parts country father let night following picture being study second eyes soon "
    "times story boys since white days ever paper hard near sentence better best across during today others "
    "however sure means knew try told young miles sun ways thing whole hear example heard several change answer "
    "room sea against top turned learn point city play toward five using himself usually money seen car morning "
    "given trees red real ice north book science black felt south open dark ball river body street fire summer"
)
WORDS = _PROSE.split()


@dataclass(frozen=True, slots=True)
class Ruler:
    """How many tokens a server counts for a prompt: `overhead_tokens + words × tokens_per_word`."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0  # the chat template and special tokens
    measured: bool = False

    def words_for(self, tokens: int, with_overhead: bool = True) -> int:
        """How many words make a prompt of so many tokens (at least one word)."""
        own = tokens - (self.overhead_tokens if with_overhead else 0.0)
        return max(1, round(own / self.tokens_per_word))

    @classmethod
    def fit(cls, short: tuple[int, int], long: tuple[int, int]) -> "Ruler":
        """The line through two measurements of (words, tokens)."""
        slope = (long[1] - short[1]) / (long[0] - short[0])
        if slope <= 0:  # the server cuts prompts or counts something else: no line to follow
            return cls()
        return cls(slope, short[1] - slope * short[0], measured=True)


def text(seed: str, words: int) -> str:
    """`words` random words; another seed gives another text from the first word on."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def block_text(blocks: tuple[int, ...], words: int, words_per_block: int, shared: str, own: str) -> str:
    """A prompt of named blocks, as traces with block hashes have them: equal names, equal words.

    `shared` seeds what prompts of one replay have in common, `own` what no block names.
    """
    parts = []
    for name in blocks:
        length = min(words_per_block, words)
        if length <= 0:
            break
        parts.append(text(f"{shared}/block/{name}", length))
        words -= length
    if words > 0:
        parts.append(text(own, words))
    return " ".join(parts)
