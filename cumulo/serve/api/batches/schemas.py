"""What /v1/files and /v1/batches take and answer, in OpenAI's form."""

from typing import Annotated, Any, Literal, get_args

import msgspec
from pydantic import BaseModel, Field

from cumulo.serve.api.openai.schemas import Label
from cumulo.serve.bodies.strict import Strict

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled"]
ENDED: tuple[Status, ...] = ("completed", "failed", "cancelled")


class LineError(msgspec.Struct, frozen=True):
    """A reason why a file is no batch."""

    code: str
    message: str
    line: int | None = None  # from 1
    param: str | None = None


class BatchRecord(msgspec.Struct):
    """What is known of one batch, as it lies on disk and as OpenAI's API shows it. Kept by Batches.

    validating -> in_progress -> finalizing -> completed, or failed (the file is no batch), or cancelling ->
    cancelled. Every change is on disk before anybody is told of it."""

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
    # Where its lines are written; at the end None for one that has no lines.
    output_file_id: str | None = None
    error_file_id: str | None = None
    times: dict[str, int] = {}  # when it came to each status

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def as_json(self) -> dict[str, Any]:
        errors = [msgspec.to_builtins(error) for error in self.errors]
        # Only what is complete has an id: a client that sees one may read the file.
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id if self.ended else None,
            "error_file_id": self.error_file_id if self.ended else None,
            "created_at": self.created_at,
            **{f"{status}_at": self.times.get(status) for status in get_args(Status) if status != "validating"},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }  # fmt: skip


Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Metadata = Annotated[dict[str, Label], Field(max_length=16)]


class BatchRequest(Strict):
    input_file_id: Label = Field(description="A file uploaded with the purpose `batch`.")
    endpoint: Endpoint = Field(description="Where every line's request goes.")
    completion_window: Literal["24h"] = Field(
        description="Accepted for compatibility: a batch goes on until it is done or cancelled."
    )
    metadata: Metadata | None = Field(None, description="Up to 16 texts of your own, kept with the batch.")


class FileObject(BaseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: dict[str, Any] | None  # a list of what is wrong, each with its code, message, param and line
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: dict[str, int]  # total, completed, failed
    metadata: dict[str, Any] | None
