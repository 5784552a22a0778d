"""Record: what is known of one batch, as it lies on disk and as OpenAI's API shows it. Kept by Batches.

validating -> in_progress -> finalizing -> completed, or failed (the file is no batch), or expired (the window is
over), or cancelling -> cancelled. Every change is on disk before anybody is told of it.
"""

from typing import Any, Literal

import msgspec

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
ENDED: tuple[Status, ...] = ("completed", "failed", "expired", "cancelled")
WINDOW_S = 24 * 3600


class LineError(msgspec.Struct, frozen=True):
    """Why a file is no batch."""

    code: str
    message: str
    line: int | None = None  # from 1
    param: str | None = None


class BatchRecord(msgspec.Struct):
    id: str
    owner: str  # the name of the key it belongs to
    endpoint: str
    input_file_id: str
    created_at: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    errors: list[LineError] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    becomes: Status | None = None  # while finalizing or cancelling: how it ends
    times: dict[str, int] = {}  # when it came to each status

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW_S

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def as_json(self) -> dict[str, Any]:
        errors = [msgspec.to_builtins(error) for error in self.errors]
        # Only what is complete has an id: a client that sees one may read the file.
        shown = self.ended
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id if shown else None,
            "error_file_id": self.error_file_id if shown else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{
                f"{status}_at": self.times.get(status)
                for status in (
                    "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled",
                )
            },
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }  # fmt: skip
