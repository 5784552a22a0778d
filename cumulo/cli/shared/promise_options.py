"""Options of `cumulo serve` that promise a latency."""

from dataclasses import dataclass
from typing import Any, ClassVar

from cumulo.cli.shared.declare import option


@dataclass(frozen=True, kw_only=True)
class PromiseOptions:
    PANEL: ClassVar[str] = "Latency"

    slo: str = option(
        "Latency to promise, for example ttft=500ms,itl=40ms: prompts are computed in pieces that keep the ITL, in "
        "order of deadline, and a request whose promise cannot be kept is refused with 429. Keys and requests can "
        "have their own; with --new-api-key: the new key's.",
        "",
    )
    slo_late: str = option(
        "With --slo: refuse, or queue (without a promise), a request whose promise cannot be kept.",
        "refuse",
    )

    def config(self) -> dict[str, Any]:
        """Fields of EngineConfig."""
        from cumulo.errors import CumuloError
        from cumulo.load.slo import parse_promise

        if self.slo_late not in ("refuse", "queue"):
            raise CumuloError(f"--slo-late must be refuse or queue, got {self.slo_late!r}")
        return {"slo": parse_promise(self.slo) if self.slo else None, "slo_late": self.slo_late}
