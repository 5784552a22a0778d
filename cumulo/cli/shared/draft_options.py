"""Options of `cumulo plan serve` and `cumulo simulate serve` for simulated speculation."""

from dataclasses import dataclass
from typing import Any, ClassVar

from cumulo.cli.shared.declare import option


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    PANEL: ClassVar[str] = "Speculation"

    acceptance: float = option(
        "Speculation: how often a drafted token is right, those before it being right, 0 to 1; 0: no speculation. "
        "The scheduler chooses how many to draft.",
        0.0,
        min=0,
        max=1,
    )
    speculate: str = option(
        "With --acceptance: what drafts. ngram: repeated text, at no cost; DIR: an EAGLE-3 head in this folder, "
        "which need not exist yet.",
        "ngram",
        metavar="ngram|DIR",
    )
    draft_choices: str = option(
        "With --speculate DIR on a GPU: how often the head's second, third and fourth choice is right, for example "
        "0.12,0.06,0.04. Trees of drafts need it; `cumulo train` reports it.",
        "",
    )

    def fields(self) -> dict[str, Any]:
        """Of a simulated replica."""
        from cumulo.errors import ConfigError

        if not self.speculate:
            raise ConfigError(
                "--speculate must be ngram or the folder of a head; for no speculation, omit --acceptance"
            )
        try:
            choices = (
                tuple(float(part) for part in self.draft_choices.split(",")) if self.draft_choices else ()
            )
        except ValueError:
            choices = (2.0,)
        if (
            len(choices) > 3
            or any(not 0 <= one <= 1 for one in choices)
            or sum(choices) + self.acceptance > 1
        ):
            raise ConfigError(
                "--draft-choices must be up to three shares that add up to at most 1 with --acceptance, such as "
                f"0.12,0.06,0.04; got {self.draft_choices!r}"
            )
        if choices and (self.speculate == "ngram" or not self.acceptance):
            raise ConfigError("--draft-choices describes a head: add --acceptance and --speculate DIR")
        return {"acceptance": self.acceptance, "speculate": self.speculate, "draft_choices": choices}
