"""PDF files that are attached: their text, or why there is none; and conversations that are imported."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from cumulo.console.chat.pdf import PdfProblem, pdf_text
from tests.console.browsing import (
    DESKTOP,
    answered,
    in_a_browser,
    looking_at,
    ready,
    say,
    settings,
    stored_chats,
)
from tests.serve.running_server import RunningServer

pytest.importorskip("pypdf")


def pdf(*pages: str, content: bytes | None = None) -> bytes:
    """A file with a line of text on each page, written as the format has it (ISO 32000-1, 7.5)."""
    kids = " ".join(f"{4 + 2 * place} 0 R" for place in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for place, text in enumerate(pages):
        drawn = (
            content
            if content is not None
            else zlib.compress(f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode())
        )
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            + f"/Contents {5 + 2 * place} 0 R >>".encode()
        )
        head = f"<< /Length {len(drawn)} /Filter /FlateDecode >>\nstream\n".encode()
        objects.append(head + drawn + b"\nendstream")
    text, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(text))
        text += f"{number} 0 obj\n".encode() + one + b"\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    return text + f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\n" \
        f"startxref\n{len(text)}\n%%EOF\n".encode()  # fmt: skip


def test_the_text_of_all_pages_is_extracted() -> None:
    assert pdf_text(pdf("The first page.", "The second one.")) == "The first page.\n\nThe second one."


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"%PDF-1.4 and nothing else", "damaged, encrypted, or no PDF"), (pdf(""), "its pages may be pictures")],
)
def test_a_file_without_text_says_why(data: bytes, why: str) -> None:
    with pytest.raises(PdfProblem, match=why):
        pdf_text(data)


@pytest.mark.long
def test_a_pdf_that_unpacks_to_gigabytes_ends_at_its_limits() -> None:
    packer = zlib.compressobj(1)
    bomb = b"".join(packer.compress(bytes(1 << 24)) for _ in range(64)) + packer.flush()
    with pytest.raises(PdfProblem):
        pdf_text(pdf("x", content=bomb))
    assert pdf_text(pdf("Still here.")) == "Still here."


class TestInABrowser:
    pytestmark = in_a_browser

    def test_a_pdf_is_counted_and_sent_and_survives_a_reload(
        self, browser: Any, server: RunningServer, tmp_path: Path
    ) -> None:
        (tmp_path / "report.pdf").write_bytes(pdf("Whales sing in winter.", "%" + "long " * 3))
        (tmp_path / "broken.PDF").write_bytes(b"%PDF-1.4")
        with looking_at(browser, server, "/", DESKTOP) as page:
            settings(page, max_tokens="4")
            page.locator("#ask-file").set_input_files(str(tmp_path / "broken.PDF"))
            page.get_by_role("alert").get_by_text("broken.PDF cannot be attached: it is damaged").wait_for()
            page.locator("#ask-file").set_input_files(str(tmp_path / "report.pdf"))
            page.locator(".chips .file-chip").get_by_text("characters, 1").wait_for()
            assert "tokens)" in page.locator(".chips .file-chip").inner_text()
            say(page, "When do whales sing?")
            answered(page)
            page.reload()
            page.locator(".said.user .file-chip").get_by_text("report.pdf").wait_for()
            entry = stored_chats(page)[0]["entries"][0]
            assert entry["files"][0]["text"].startswith("Whales sing in winter.")

    def test_an_exported_conversation_is_imported_as_a_new_one(
        self, browser: Any, server: RunningServer, tmp_path: Path
    ) -> None:
        said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho, <b>you</b>."}]
        (tmp_path / "chat.json").write_text(
            json.dumps({"id": "0" * 24, "title": "Greeting", "entries": said})
        )
        (tmp_path / "odd.json").write_text('{"entries": [{"content": 5}]}')
        with looking_at(browser, server, "/", DESKTOP) as page:
            ready(page)
            page.locator("#import-file").set_input_files(str(tmp_path / "odd.json"))
            page.get_by_text("This is no conversation that was exported as JSON.").wait_for()
            page.locator("#import-file").set_input_files(str(tmp_path / "chat.json"))
            page.get_by_text("Ho, <b>you</b>.").wait_for()
            (kept,) = stored_chats(page)
            assert kept["name"] == "Greeting" and kept["id"] != "0" * 24
            page.reload()
            page.get_by_text("Ho, <b>you</b>.").wait_for()
