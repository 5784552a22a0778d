"""An agent of the OpenAI agents SDK calls a function through this server, by either of its APIs."""

import asyncio
from typing import Any

import pytest

from tests import peers
from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model
from tests.thorough import rare

pytestmark = [needs_built_in_model, pytest.mark.long]


@pytest.mark.speaking
@pytest.mark.parametrize(
    ("api", "streamed"),
    [
        ("OpenAIResponsesModel", True),
        ("OpenAIChatCompletionsModel", False),
        *rare(("OpenAIResponsesModel", False), ("OpenAIChatCompletionsModel", True)),
    ],
)
def test_an_agent_calls_a_function_and_reads_its_result(
    server: RunningServer, api: str, streamed: bool
) -> None:
    agents = peers.agents
    agents.set_tracing_disabled(True)  # its traces would go to another host
    cities = []

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "It is sunny."

    async def run() -> Any:
        async with server.async_client() as client:
            agent = agents.Agent(
                name="forecaster",
                instructions="Answer briefly.",
                tools=[weather],
                model=getattr(agents, api)(model=MODEL, openai_client=client),
                # The first turn must call; the SDK lets the model choose after that.
                model_settings=agents.ModelSettings(
                    temperature=0, tool_choice="required", parallel_tool_calls=False, max_tokens=60
                ),
            )
            if not streamed:
                return await agents.Runner.run(agent, "What is the weather in Paris?", max_turns=4)
            running = agents.Runner.run_streamed(agent, "What is the weather in Paris?", max_turns=4)
            async for _ in running.stream_events():
                pass
            return running

    result = asyncio.run(run())
    assert len(cities) >= 1 and "Paris" in cities[0]
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"] and kinds[-1] == "message_output_item"
    assert "sunny" in result.final_output
