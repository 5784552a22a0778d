"""A second server for what the built-in model's own options and template do not show: a tiny model that thinks."""

from collections.abc import Iterator

import pytest

from tests.serve.running_server import RunningServer, running_server
from tests.serve.tiny_model import save_tiny_model

THINKING = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if reasoning_effort %}effort: {{ reasoning_effort }}
{% endif -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif -%}
{% endif -%}
"""
DEFAULT_MAX_TOKENS = 7


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("thinker")
    (folder / "thinking.jinja").write_text(THINKING)
    with running_server(
        str(save_tiny_model(folder)), "--no-console", "--chat-template", str(folder / "thinking.jinja"),
        "--default-max-tokens", str(DEFAULT_MAX_TOKENS),
    ) as running:  # fmt: skip
        yield running
