"""Filling in skeletons gives what running the template gives, and templates that look at contents are run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.errors import InvalidRequest
from cumulo.models.text.chat_template import ChatTemplate
from cumulo.models.text.template_skeleton import contents_are_opaque
from tests import thorough

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
    "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ message.content ~ eos_token }}\n{% else %}\n"
    "{{ message['content'] if loop.index0 else 'first: ' + message['content'] }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
TWICE = (
    "{{ messages[0]['content'] }}{% for m in messages if m.role != 'tool' %}"
    "{{ m.content }}|{{ m.role }};{% endfor %}"
)

OPAQUE = {"chatml": CHATML, "zephyr": ZEPHYR, "twice": TWICE}
NOT_OPAQUE = [
    "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "{% for m in messages %}{{ m.content.strip() }}{% endfor %}",
    "{% for m in messages %}{% if m.content %}x{% endif %}{% endfor %}",
    "{% for m in messages %}{{ 'x' if 'a' in m.content else 'y' }}{% endfor %}",
    "{% for m in messages %}{{ m.content[0] }}{% endfor %}",
    "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
    "{% for m in messages %}{{ (m.content + 'a') == 'ba' }}{% endfor %}",
    "{% for m in messages %}{% set c = m.content %}{{ c }}{% endfor %}",
    "{% for m in messages %}{{ m }}{% endfor %}",
    "{% for m in messages %}{{ m.name }}{% endfor %}",
    "{% for m in messages %}{{ m['con' ~ 'tent'] }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.content }}{% endfor %}",
    "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    "{% for messages in messages %}{{ messages.content }}{% endfor %}",
    "{% for m in messages %}{% for c in m.content %}{{ c }}-{% endfor %}{% endfor %}",
    "{% for a, b in messages %}{{ a }}{% endfor %}",
    "{{ messages | tojson }}", "{{ messages }}", "{{ messages | length }}", "{{ strftime_now('%S') }}",
    "{% macro w(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ w(m) }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
]  # fmt: skip

roles = st.sampled_from(["system", "user", "assistant", "tool", "robot"])
contents = st.one_of(st.text(max_size=12), st.sampled_from(["{{ 7 * 7 }}", " \n", "0;", "<|im_end|>", "\0"]))
conversations = st.lists(st.fixed_dictionaries({"role": roles, "content": contents}), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def templates() -> dict[str, ChatTemplate]:
    made = {name: ChatTemplate(source, {"eos_token": "</s>"}) for name, source in OPAQUE.items()}
    for template in made.values():
        template.render([{"role": "user", "content": "compiled now"}])
    return made


@settings(max_examples=thorough.examples(150), deadline=None)
@given(st.sampled_from(sorted(OPAQUE)), conversations, st.booleans())
def test_a_filled_skeleton_is_what_the_template_renders(
    templates: dict[str, ChatTemplate], name: str, messages: list[dict[str, str]], opens: bool
) -> None:
    template = templates[name]
    assert template._skeletons is not None
    filled = template._skeletons.fill(messages, opens)
    run = template._run([dict(message) for message in messages], opens)  # jinja2 itself
    assert filled == run == template.render(messages, add_generation_prompt=opens)


@pytest.mark.parametrize("source", OPAQUE.values(), ids=OPAQUE)
def test_templates_that_only_write_contents_are_recognised(source: str) -> None:
    assert contents_are_opaque(source)


@pytest.mark.parametrize("source", NOT_OPAQUE)
def test_a_template_that_does_anything_else_with_messages_is_run(source: str) -> None:
    assert not contents_are_opaque(source)


def test_tools_variables_and_contents_that_are_no_text_go_to_the_template() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}{{ mood }}")
    assert template.render([{"role": "user", "content": "a"}]) == "aNone"
    assert template.render([{"role": "user", "content": "a"}], mood="glad") == "aNoneglad"
    assert template.render([{"role": "user", "content": "a"}], tools=[{"x": 1}]) == "a[{'x': 1}]"
    assert template.render([{"role": "assistant", "content": None}]) == "NoneNone"
    assert template.render([{"role": "user", "content": [{"type": "text", "text": "b"}]}]) == "bNone"


def test_a_template_that_fails_fails_the_same_way_every_time() -> None:
    template = ChatTemplate("{% for m in messages %}{{ 1 + m.content }}{% endfor %}")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unsupported operand"):
            template.render([{"role": "user", "content": "a"}])


def test_roles_without_end_do_not_fill_the_memory(templates: dict[str, ChatTemplate]) -> None:
    template = templates["chatml"]
    assert template._skeletons is not None
    for number in range(600):
        assert f"role-{number}\n" in template.render([{"role": f"role-{number}", "content": "x"}])
    assert len(template._skeletons._known) <= 256
