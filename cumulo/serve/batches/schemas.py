"""What /v1/files and /v1/batches take and answer, in OpenAI's form."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from cumulo.serve.openai.fields import Strict
from cumulo.serve.openai.schemas import Label

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Metadata = Annotated[dict[str, Label], Field(max_length=16)]


class BatchRequest(Strict):
    input_file_id: Label = Field(description="A file uploaded with the purpose `batch`.")
    endpoint: Endpoint = Field(description="Where every line's request goes.")
    completion_window: Literal["24h"] = Field(description="What is not done by then is given up.")
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


class FileList(BaseModel):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchError(BaseModel):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(BaseModel):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, Any] | None


class BatchList(BaseModel):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
