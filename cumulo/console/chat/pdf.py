"""The text of PDF files that are attached to a message. Used by the chat page; pypdf reads them.

They are read in a killable worker, within limits on time and memory: a stranger's file may be made to take hours.
"""

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from typing import Any

from cumulo.base.sandbox.worker import MIB, JobEnded, JobFailed, Limits, Worker, WorkerUnavailable

LARGEST_PDF_BYTES = 8_000_000
_LIMITS = Limits(cpu_s=20.0, wall_s=60.0, memory_bytes=512 * MIB)


class PdfProblem(ValueError):
    """Why there is no text, as the end of a sentence: 'it ...'."""


def pdf_text(data: bytes) -> str:
    """All pages, one after the other. It takes seconds: call it in a thread."""
    if find_spec("pypdf") is None:
        raise PdfProblem("is a PDF, which the server reads with pypdf: pip install pypdf")
    try:
        _, text = _worker().call(data, _LIMITS)
    except JobEnded as error:
        raise PdfProblem(f"cannot be read: {error.words}") from None
    except (JobFailed, WorkerUnavailable) as error:
        raise PdfProblem("is damaged, encrypted, or no PDF") from error
    if not text.strip():
        raise PdfProblem("has no text: its pages may be pictures")
    return text.decode("utf-8")


@cache
def _worker() -> Worker:
    return Worker(f"{__name__}:reader")


def reader(_: Any) -> Callable[[bytes], tuple[dict[str, Any], bytes]]:
    """In the worker: what a job does."""
    from pypdf import PdfReader

    logging.disable()

    def read(data: bytes) -> tuple[dict[str, Any], bytes]:
        pages = [page.extract_text().strip() for page in PdfReader(BytesIO(data)).pages]
        return {}, "\n\n".join(filter(None, pages)).encode("utf-8", "replace")

    return read
