"""Team: the ranks that save and load together, so that all succeed or all know why not. Used by the stores.

Its process group must be its own: it talks from the thread that writes, while training uses the others.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from cumulo.errors import TrainingError
from cumulo.ranks.collectives import gather_objects
from cumulo.ranks.groups import Group

T = TypeVar("T")
FAILURES = (Exception, CheckpointException)  # torch's own is no Exception


class Team:
    def __init__(self, group: Group | None = None) -> None:
        """None: this process alone."""
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def together(self, work: Callable[[], T]) -> list[T]:
        """Everyone works; everyone gets everyone's results, or the first rank's complaint as an error."""
        if self.group is None:
            return [work()]
        result: tuple[Any, str | None]
        own: BaseException | None = None
        try:
            result = work(), None
        except FAILURES as error:
            result, own = (None, cause(error)), error
        found = gather_objects(result, self.group)
        for rank, (_, complaint) in enumerate(found):
            if complaint is not None:
                raise own or TrainingError(f"rank {rank}: {complaint}")
        return [value for value, _ in found]

    def first(self, work: Callable[[], T]) -> T:
        """Rank 0 works; everyone gets its result."""
        found: list[Any] = self.together(lambda: work() if self.rank == 0 else None)
        result: T = found[0]
        return result


def cause(error: BaseException) -> str:
    """The first line of what happened, out of torch's wrapping."""
    inner = getattr(error, "failures", None)
    if isinstance(inner, dict) and inner:
        error = next(iter(inner.values()))[0]
    if isinstance(error, TrainingError):
        return str(error)
    chain: BaseException | None = error
    # A full disk reaches us as a complaint about the file's format, raised over the OSError.
    while chain is not None:
        if isinstance(chain, OSError):
            return f"{type(chain).__name__}: {chain.strerror or chain}"
        chain = chain.__cause__ or chain.__context__
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"
