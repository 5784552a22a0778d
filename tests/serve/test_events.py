"""Events as they go over the wire."""

import json

import pytest

from cumulo.serve.api.openai.events import PreparedEvent, event

# What `str.splitlines` takes for a line end. JSON escapes the control characters; the rest must be our care.
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@pytest.mark.parametrize("end", LINE_ENDS)
def test_an_event_is_one_line_even_for_clients_that_split_at_unicodes_line_ends(end: str) -> None:
    text = f"é{end}ü"
    prepared = PreparedEvent({"id": "a", "text": PreparedEvent.MARK}).with_text(text)
    for written in (event({"id": "a", "text": text}), prepared):
        line, *rest = written.decode().splitlines()
        assert rest == [""]
        assert json.loads(line.removeprefix("data: ")) == {"id": "a", "text": text}
