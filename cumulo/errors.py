"""Errors meant for the person at the keyboard: what was asked, why it cannot be, what to change.

The command line prints them as one line without a traceback; the server maps them to 4xx answers.
Anything else that is raised is a bug of ours.
"""


class CumuloError(Exception):
    """Base of every error whose message is written for the user."""


class InvalidRequest(CumuloError):
    """A request's own fields make it impossible to serve (empty prompt, NaN temperature, ...)."""


class PromptTooLong(InvalidRequest):
    """A prompt has more tokens than the model's context holds."""


class Overloaded(InvalidRequest):
    """A promised latency cannot be kept now; later it can."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelError(CumuloError):
    """A model's files are missing, damaged, incomplete or of an unknown architecture."""


class OutOfMemory(CumuloError):
    """The memory ledger says it does not fit; the message names the largest setting that would."""


class ConfigError(CumuloError):
    """A configuration names what does not exist, or numbers that cannot belong together."""


class TrainingError(CumuloError):
    """Training cannot begin or go on: no data, a loss that is no number, no checkpoint that is whole."""


class RanksFailed(CumuloError):
    """What went wrong on which rank, and the stacks of those that were still waiting."""


class StoppedTogether(RanksFailed):
    """What went wrong on which rank, as all of them have agreed: nobody else needs to be asked."""


def require_least(
    options: object,
    least: float,
    *names: str,
    above: bool = False,
    of: str = "",
    unit: str = "",
    advice: str = "",
) -> None:
    """Refuse the first of these fields that is less than `least`, or with `above` not more; None is allowed."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not (value > least if above else value >= least):
            wanted = f"more than {least:g}{unit}" if above else f"{least:g}{unit} or more"
            raise ConfigError(f"{of}{name} must be {wanted}, got {value}{advice}")
