"""/v1/files: what is kept, for whom, how much of it, and what a hostile form can do (nothing)."""

import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from cumulo.errors import CumuloError
from cumulo.serve.api.batches.store import FileStore
from cumulo.serve.errors import ApiError
from tests.serve.batches.help import Bench
from tests.serve.running_server import running_server

pytestmark = pytest.mark.long

MIB = 1 << 20


def upload(
    bench: Bench,
    content: bytes | Iterator[bytes],
    kind: str = "multipart/form-data; boundary=x",
    name: str = "ann",
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {bench.keys[name]}", "Content-Type": kind}
    return httpx.post(f"{bench.server.url}/v1/files", content=content, headers=headers, timeout=60)


def form(
    content: bytes = b"{}", purpose: bytes = b"batch", filename: bytes = b"a.jsonl", more: bytes = b""
) -> bytes:
    return (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + purpose + b"\r\n" + more
        + b'--x\r\nContent-Disposition: form-data; name="file"; filename="' + filename + b'"\r\n'
        b"Content-Type: text/plain\r\n\r\n" + content + b"\r\n--x--\r\n"
    )  # fmt: skip


def test_a_file_is_uploaded_listed_read_and_deleted(bench: Bench) -> None:
    client = bench.client("bob")
    content = os.urandom(200_000) + b"\r\n--x\r\n\xff\n"
    made = client.files.create(file=("my requests.jsonl", content), purpose="batch")
    assert (made.bytes, made.filename, made.purpose) == (len(content), "my requests.jsonl", "batch")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == content
    other = client.files.create(file=("b.jsonl", b"{}"), purpose="batch")
    listed = [file.id for file in client.files.list(purpose="batch", limit=1)]  # page by page
    assert {made.id, other.id} <= set(listed) and len(listed) == len(set(listed))
    assert [file.id for file in client.files.list(order="asc")] == [file.id for file in client.files.list()][
        ::-1
    ]
    for file_id in (made.id, other.id):
        assert client.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file_id)
    assert not list(bench.folder.glob(f"{made.id}*"))


def test_content_is_to_be_saved_and_never_shown_as_a_page(bench: Bench) -> None:
    page = b"<script>alert(1)</script>"
    file_id = upload(bench, form(page, filename=b"../../evil.html")).json()["id"]
    headers = {"Authorization": f"Bearer {bench.keys['ann']}"}
    answer = bench.server.get(f"/v1/files/{file_id}/content", headers=headers)
    assert answer.content == page and answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == f'attachment; filename="{file_id}.jsonl"'
    assert answer.headers["x-content-type-options"] == "nosniff"
    stored = bench.folder / f"{file_id}.data"
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert not list(bench.folder.rglob("*evil*"))
    bench.client().files.delete(file_id)


def test_other_keys_and_strangers_see_no_file(bench: Bench) -> None:
    made = bench.client("ann").files.create(file=("a", b"{}"), purpose="batch")
    bob = bench.client("bob")
    for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    assert made.id not in {file.id for file in bob.files.list()}
    assert bench.server.get(f"/v1/files/{made.id}").status_code == 401
    for strange in ("../keys.json", "..%2Fkeys.json", "file-..", "lock", "%00", "x" * 2000):
        answer = bench.server.get(
            f"/v1/files/{strange}/content", headers={"Authorization": f"Bearer {bench.keys['ann']}"}
        )
        assert answer.status_code == 404
    bench.client("ann").files.delete(made.id)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"{}", "application/json", "multipart/form-data"),
        (b"{}", "multipart/form-data", "multipart/form-data"),
        (b"garbage", "multipart/form-data; boundary=x", "not valid multipart"),
        (form()[:-8], "multipart/form-data; boundary=x", "`file` is missing"),
        (form(purpose=b"fine-tune"), "multipart/form-data; boundary=x", "purpose `batch`"),
        (form(b""), "multipart/form-data; boundary=x", "empty"),
        (form(purpose=b"b" * 5000), "multipart/form-data; boundary=x", "exceeded maximum size"),
        (form(filename=b"f" * 5000), "multipart/form-data; boundary=x", "not valid multipart"),
        (
            form(more=b"--x\r\n" + b"A: b\r\n" * 100_000 + b"\r\n\r\n"),
            "multipart/form-data; boundary=x",
            "not valid multipart",
        ),
        (
            form(more=b'--x\r\nContent-Disposition: form-data; name="n"\r\n\r\n\r\n' * 20),
            "multipart/form-data; boundary=x",
            "Too many fields",
        ),
        (
            form(more=b'--x\r\nContent-Disposition: form-data; name="file"; filename="b"\r\n\r\n{}\r\n'),
            "multipart/form-data; boundary=x",
            "Too many files",
        ),
        (form(more=b"--x\r\nA: b\r\n\r\n\r\n"), "multipart/form-data; boundary=x", '"name" must be'),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_form_that_is_none_is_refused_and_leaves_nothing(
    bench: Bench, content: bytes, kind: str, message: str
) -> None:
    before = set(bench.folder.iterdir())
    answer = upload(bench, content, kind)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert set(bench.folder.iterdir()) == before


def test_files_have_a_limit_of_their_own_and_bodies_keep_theirs(bench: Bench) -> None:
    before = set(bench.folder.iterdir())
    for content in (form(b"x" * (MIB + 1)), form(b"x" * (3 * MIB))):
        told, unknown_length = upload(bench, content), upload(bench, iter([content]))
        assert {told.status_code, unknown_length.status_code} == {413}
    assert set(bench.folder.iterdir()) == before
    exact = upload(bench, form(b"x" * MIB), name="slow")
    assert exact.status_code == 200, exact.text
    # Only a form is written to disk as it comes; anything else is a body like others.
    json_body = upload(bench, b"[" + b"1," * (3 * MIB) + b"1]", "application/json")
    assert json_body.status_code == 413


def test_a_key_stores_no_more_than_it_may(bench: Bench) -> None:
    for file in bench.client("slow").files.list():
        bench.client("slow").files.delete(file.id)
    made = [upload(bench, form(b"x" * MIB), name="slow") for _ in range(4)]
    assert [answer.status_code for answer in made] == [200, 200, 200, 413]
    assert "delete files" in made[3].json()["error"]["message"]
    assert upload(bench, form(b"x" * MIB), name="bob").status_code == 200
    bench.client("slow").files.delete(made[0].json()["id"])
    assert upload(bench, form(b"x" * 1000), name="slow").status_code == 200


def test_what_is_claimed_counts_until_it_is_given_back(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "files", bytes_per_key=1000, bytes_in_all=1500)
    store.keep("ann", "a", io.BytesIO(b"x" * 600))
    with store.claiming("ann") as claim, store.claiming("bob") as claim_of_bob:
        claim(300)
        claim(400)
        with pytest.raises(ApiError, match="delete files"):
            claim(401)
        claim_of_bob(500)
        with pytest.raises(ApiError, match="this server stores 1,500 bytes"):
            claim_of_bob(501)
    store.close()
    again = FileStore(tmp_path / "files", bytes_per_key=1000, bytes_in_all=1500)
    with again.claiming("ann") as claim:
        claim(400)
        with pytest.raises(ApiError):
            claim(401)
    again.close()


def test_a_file_of_the_documented_size_is_taken(tiny: Path, tmp_path: Path) -> None:
    with running_server(str(tiny), "--files", str(tmp_path / "files")) as server:
        kept = server.client().files.create(file=("a", b"x" * (100 * MIB)), purpose="batch")
        assert kept.bytes == 100 * MIB == (tmp_path / "files" / f"{kept.id}.data").stat().st_size


def test_two_servers_never_share_a_folder(tmp_path: Path) -> None:
    first = FileStore(tmp_path / "files", 1000, 1000)
    with pytest.raises(CumuloError, match="in use by another server"):
        FileStore(tmp_path / "files", 1000, 1000)
    first.close()
    FileStore(tmp_path / "files", 1000, 1000).close()


def test_without_a_folder_files_live_as_long_as_the_server() -> None:
    store = FileStore(None, 1000, 1000)
    kept = store.keep("ann", "a\n\x00b", io.BytesIO(b"{}"))
    assert store.get(kept.id, "ann").filename == "ab"
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    store.close()
    assert not store.folder.exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CumuloError, match="--files DIR"):
        FileStore(tmp_path / "file" / "below", 1000, 1000)
