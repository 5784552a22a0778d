"""A batch goes on after its server: nothing is lost, and nothing is done twice."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cumulo.serve.api.batches import lines
from cumulo.serve.api.batches.lines import Results
from cumulo.serve.api.batches.schemas import BatchRecord, RequestCounts
from tests.serve.batches.help import CHAT, begin, chat, end_of, line, results
from tests.serve.running_server import running_server, wait_for

pytestmark = pytest.mark.long


@pytest.mark.long
@pytest.mark.long
def test_a_killed_servers_batches_are_resumed(tiny: Path, tmp_path: Path) -> None:
    options = (str(tiny), "--files", str(tmp_path / "files"), "--max-running", "4")
    with running_server(*options) as server:
        client = server.client()
        long: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
        batch = begin(client, [line(f"{n}", chat(f"x {n}", **long)) for n in range(40)])
        waiting = begin(client, [line(f"{n}", chat("x")) for n in range(3)])
        record_path = tmp_path / "files" / f"{batch.id}.json"
        record = msgspec.json.decode(record_path.read_bytes(), type=BatchRecord)
        output = tmp_path / "files" / f"{record.output_file_id}.data"
        wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= 5, "some results", server)
        server.end(signal.SIGKILL)
    # What was being written when the server was killed is cut off.
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_0","custom_id":"39","resp')
    before = {one["custom_id"]: one["id"] for one in map(json.loads, output.read_bytes().split(b"\n")[:-1])}
    # Another one had just written its last line when the server was killed.
    written = replace(
        record,
        id="batch_w",
        status="finalizing",
        output_file_id="file-w",
        request_counts=RequestCounts(total=1),
    )
    (tmp_path / "files" / "batch_w.json").write_bytes(msgspec.json.encode(written))
    (tmp_path / "files" / "file-w.data").write_text('{"custom_id":"a"}\n')
    with running_server(*options) as server:
        client = server.client()
        finalized = end_of(client, client.batches.retrieve("batch_w"), server)
        assert finalized.status == "completed" and finalized.request_counts
        assert finalized.request_counts.completed == 1
        assert set(results(client, finalized.output_file_id)) == {"a"}
        ended = end_of(client, batch, server)
        assert ended.status == "completed" and ended.request_counts
        assert ended.request_counts.to_dict() == {"total": 40, "completed": 40, "failed": 0}
        after = {name: one["id"] for name, one in results(client, ended.output_file_id).items()}
        assert len(after) == 40 and {name: after[name] for name in before} == before
        assert ended.error_file_id is None
        assert end_of(client, waiting, server).status == "completed"
        # An orderly end keeps what was uploaded; a finished batch stays as it was.
        assert server.end() == 0
    assert sorted(path.name for path in (tmp_path / "files").glob("batch_*")) == sorted(
        [f"{batch.id}.json", f"{waiting.id}.json", "batch_w.json"]
    )


def test_results_know_what_is_done_and_cut_off_what_is_not(tmp_path: Path) -> None:
    paths = tmp_path / "output", tmp_path / "errors"
    first = Results(*paths)
    first.write("a", b'{"custom_id": "a", "response": 1}\n', good=True)
    first.write("b", b'{"custom_id": "b", "error": 1}\n', good=False)
    first.close()
    with paths[0].open("ab") as file:
        file.write(b'{"custom_id":"c"')
    again = Results(*paths)
    assert again.done == {"a", "b"} and again.counts == {True: 1, False: 1}
    again.write("c", b'{"custom_id": "c", "response": 2}\n', good=True)
    again.close()
    assert [json.loads(one)["custom_id"] for one in paths[0].read_text().splitlines()] == ["a", "c"]


def check(tmp_path: Path, content: str, limit: int = 1000) -> tuple[int, list[str]]:
    path = tmp_path / "lines"
    path.write_text(content, "utf-8")
    count, errors = lines.check(path, CHAT, limit)
    return count, [error.code for error in errors]


def test_a_file_is_bounded_in_lines_errors_and_length_of_a_line(tmp_path: Path) -> None:
    good = line("{}", {})
    assert check(tmp_path, "\n".join(good.replace("{}", str(n), 1) for n in range(3))) == (3, [])
    assert check(tmp_path, "\n \n") == (0, ["empty_file"])
    assert check(tmp_path, "x\n" * 1000) == (0, ["invalid_json_line"] * lines.MAX_ERRORS)
    assert check(tmp_path, good + "\n" + "x" * 2000 + "\n" + good) == (1, ["line_too_long"])
    many = "\n".join(good.replace("{}", str(n), 1) for n in range(lines.MAX_LINES + 5))
    assert check(tmp_path, many)[1] == ["too_many_tasks"]
    assert check(tmp_path, many.rsplit("\n", 5)[0]) == (lines.MAX_LINES, [])


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    body = '{"messages": [{"content": "é\\u2028"}],  "n": 1.0}'
    path.write_text(f'\n{{"custom_id": "a", "method": "POST", "url": "{CHAT}", "body": {body}}}\n', "utf-8")
    assert [(one.custom_id, one.body.decode()) for one in lines.read(path, 1000)] == [("a", body)]
