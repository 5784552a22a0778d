"""What /v1/files and /v1/batches take and answer, in OpenAI's form. On disk it is the same, with its owner."""

import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from cumulo.serve.access.keys import Caller
from cumulo.serve.api.openai.schemas import Label
from cumulo.serve.bodies.strict import Strict

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled"]
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Metadata = Annotated[dict[str, Label], Field(max_length=16)]


class BatchRequest(Strict):
    input_file_id: Label = Field(description="A file uploaded with the purpose `batch`.")
    endpoint: Endpoint = Field(description="Where every line's request goes.")
    completion_window: Literal["24h"] = Field(
        description="Accepted for compatibility: a batch goes on until it is done or cancelled."
    )
    metadata: Metadata | None = Field(None, description="Up to 16 texts of your own, kept with the batch.")


def _now() -> int:
    return int(time.time())


@dataclass(frozen=True, slots=True, kw_only=True)
class FileObject:
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int = field(default_factory=_now)
    expires_at: int | None = None
    filename: str  # as the caller called it
    purpose: str
    status: Literal["processed"] = "processed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile(FileObject):
    owner: str  # the name of the key it belongs to


@dataclass(frozen=True, slots=True)
class LineError:
    """A reason why a file is no batch."""

    code: str
    message: str
    line: int | None = None  # from 1
    param: str | None = None


@dataclass(frozen=True, slots=True)
class LineErrors:
    data: list[LineError]
    object: Literal["list"] = "list"


@dataclass(slots=True)
class RequestCounts:
    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(slots=True, kw_only=True)
class BatchObject:
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    # Where its lines are written; at the end None for one that has no lines.
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int = field(default_factory=_now)
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


@dataclass(slots=True, kw_only=True)
class BatchRecord(BatchObject):
    """What is known of one batch. Kept by Batches.

    validating -> in_progress -> finalizing -> completed, or failed (the file is no batch, or its results have no
    room), or cancelling -> cancelled. Every change is on disk before anybody is told of it."""

    owner: str  # the name of the key it belongs to
    let_in: Caller | None = (
        None  # its caller, where it was not a key of this server that let it in, but a gateway
    )

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed", "cancelled")


def shown(kept: StoredFile | BatchRecord) -> dict[str, Any]:
    """What its owner is told of it."""
    told: dict[str, Any] = msgspec.to_builtins(kept)
    del told["owner"]
    if isinstance(kept, BatchRecord):
        del told["let_in"]
        if not kept.ended:  # only what is complete has an id: a client that sees one may read the file
            told |= {"output_file_id": None, "error_file_id": None}
    return told
