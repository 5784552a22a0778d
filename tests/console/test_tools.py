"""Tools entered on the chat page, and calls put together from a stream; no browser."""

import json

import pytest

pytest.importorskip("nicegui")

from cumulo.console.chat.answer import ShownToolCall
from cumulo.console.chat.answer_view import _laid_out
from cumulo.console.chat.settings import EXAMPLE, ToolsProblem, read_tools


def test_the_example_is_a_list_of_tools_and_no_text_is_none() -> None:
    assert [tool["function"]["name"] for tool in read_tools(EXAMPLE)] == ["get_weather"]
    assert read_tools("") == read_tools(" \n") == []


def test_one_tool_and_bare_functions_are_understood() -> None:
    (tool,) = json.loads(EXAMPLE)
    assert read_tools(json.dumps(tool)) == [tool]
    assert read_tools(json.dumps([tool["function"]])) == [tool]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[{", "not JSON"),
        ("[1]", "0: "),
        ('[{"type": "function"}]', "0.function: Field required"),
        ('[{"name": "a b"}]', "0.function.name"),
        ('[{"name": "f", "parameters": []}]', "0.function.parameters"),
        ('[{"name": "f"}, {"name": "f"}]', "two tools are named 'f'"),
        (json.dumps([{"name": f"f{i}"} for i in range(129)]), "at most 128"),
    ],
)
def test_what_is_no_tool_is_told_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(ToolsProblem) as told:
        read_tools(text)
    assert problem in str(told.value)


def test_a_call_is_put_together_from_its_pieces_and_can_be_said_again() -> None:
    call = ShownToolCall()
    call.add_piece({"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": ""}})
    call.add_piece({"index": 0, "function": {"arguments": '{"city": "<b>'}})
    assert not call.whole and "cut short" in _laid_out(call)
    call.add_piece({"index": 0, "function": {"arguments": '", "days": [1, 2]}'}})
    assert call.whole
    assert call.message_part() == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "<b>", "days": [1, 2]}'},
    }
    shown = _laid_out(call)
    assert "&lt;b&gt;" in shown and "<b>&quot;" not in shown and "cut short" not in shown
