"""What models write instead of plain text: tool calls and reasoning. Text in, events out; nothing else.

The chat endpoints use `detect_tool_format` when a model is loaded, one parser per streamed choice, and
`tool_guide` where `tool_choice` leaves the model no choice.
"""

from cumulo.serve.formats.detect import (
    ToolFormat,
    detect_reasoning,
    detect_tool_format,
    hides_markers,
    opens_reasoning,
    tool_call_parser,
)
from cumulo.serve.formats.events import Event, Text, ToolCallArguments, ToolCallParser, ToolCallStart
from cumulo.serve.formats.forcing import describe_tools, tool_guide
from cumulo.serve.formats.reasoning import Reasoning, ReasoningParser

__all__ = [
    "Event",
    "Reasoning",
    "ReasoningParser",
    "Text",
    "ToolCallArguments",
    "ToolCallParser",
    "ToolCallStart",
    "ToolFormat",
    "describe_tools",
    "detect_reasoning",
    "detect_tool_format",
    "hides_markers",
    "opens_reasoning",
    "tool_call_parser",
    "tool_guide",
]
