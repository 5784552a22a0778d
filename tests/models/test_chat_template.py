"""Chat templates: the same text as transformers renders, and no harm from templates that mean harm."""

import pytest

from cumulo.errors import CumuloError, InvalidRequest, ModelError
from cumulo.models.text.chat_template import ChatTemplate
from tests import peers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" ~ system_message ~ "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}
{{ message['content'] + eos_token}}
{% endgeneration %}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}"""
MACROS = """{% macro show(value, depth) %}{% if value is mapping %}{% for k, v in value|items %}{{ k ~ ':' }}
{{- show(v, depth + 1) }},{% endfor %}{% elif value is string %}"{{ value }}"
{% else %}{{ value|tojson }}{% endif %}
{% endmacro %}{% set ns = namespace(count=0) %}{% for m in messages|selectattr('role', 'equalto', 'user') %}
{% set ns.count = ns.count + 1 %}{{ loop.index }}/{{ loop.length }}
{{ '%02d' % ns.count }} {{ '{:>4}'.format(7) }}
{{ show({'a': {'b': 1700000000}, 'text': m.content}, 0) }}{% if not loop.last %};{% endif %}{% endfor %}"""

USER = {"role": "user", "content": "Straße  <b>&  'x' 日本 "}
ASSISTANT = {"role": "assistant", "content": " fine\n"}
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"x": [1, 2.5, None, True]}}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.long
@pytest.mark.parametrize(
    "template", [CHATML, LLAMA3, MISTRAL, MACROS], ids=["chatml", "llama3", "mistral", "macros"]
)
@pytest.mark.parametrize("messages", [[USER], [USER, ASSISTANT, USER]], ids=["one", "three"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_the_text_is_what_transformers_renders(template, messages, add_generation_prompt, tools):
    [expected], _ = peers.transformers.utils.chat_template_utils.render_jinja_template(
        [messages], tools=tools, chat_template=template, add_generation_prompt=add_generation_prompt, **TOKENS
    )
    found = ChatTemplate(template, TOKENS).render(
        messages, add_generation_prompt=add_generation_prompt, tools=tools
    )
    assert found == expected


def test_a_system_message_and_a_skipped_tool_message_are_rendered_as_transformers_does():
    messages = [{"role": "system", "content": " Be brief. "}, USER, {"role": "tool", "content": "42"}]
    [expected], _ = peers.transformers.utils.chat_template_utils.render_jinja_template(
        [messages], chat_template=LLAMA3, **TOKENS
    )
    assert ChatTemplate(LLAMA3, TOKENS).render(messages, add_generation_prompt=False) == expected


def test_what_a_template_refuses_is_an_invalid_request_with_its_words():
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate(MISTRAL, TOKENS).render([USER, USER])


def test_text_parts_are_joined_to_one_content():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo" in ChatTemplate(CHATML).render([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        {"role": "user"},
        [{"content": "x"}],
        ["x"],
        [{"role": "user", "content": 3}],
        [{"role": "user"}],
    ],
)
def test_messages_of_a_wrong_form_are_invalid_requests(messages):
    with pytest.raises(InvalidRequest):
        ChatTemplate(CHATML).render(messages)


def test_a_template_that_is_not_jinja_is_a_model_error_only_when_used():
    template = ChatTemplate("{% if %}")
    with pytest.raises(ModelError, match="not valid jinja2"):
        template.render([USER])


def test_a_template_that_touches_missing_fields_blames_the_messages():
    with pytest.raises(InvalidRequest, match="fails on these messages"):
        ChatTemplate("{{ messages[0].name.first }}").render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages[0].content.format.__self__.__class__.__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
    ],
)
def test_escapes_from_the_sandbox_are_refused(source):
    with pytest.raises(CumuloError):
        ChatTemplate(source).render([USER])


def test_a_forbidden_attribute_that_is_only_shown_shows_nothing():
    assert ChatTemplate("{{ raise_exception.__globals__ }}{{ ''.__class__ }}").render([USER]) == ""


GROW = "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = EXPR %}{% endfor %}"


@pytest.mark.long
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) recursive %}{{ loop(range(90000)) }}{% endfor %}",
        "{{ range(10**9)|list }}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ 'a' * 10**10 }}",
        "{{ 10 * ('a' * 900000) * 900000 }}",
        "{{ 9**(9**9) }}",
        "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 1000000000) }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ '%1000000000d'|format(1) }}",
        GROW.replace("EXPR", "ns.s ~ ns.s"),
        GROW.replace("EXPR", "ns.s + ns.s"),
        GROW.replace("EXPR", "[ns.s, ns.s]|join"),
        GROW.replace("EXPR", "ns.s.replace('a', ns.s)"),
        GROW.replace("EXPR", "ns.s|replace('a', ns.s)"),
        "{% set x %}{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}{{ x|length }}",
        "{% filter upper %}{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}{% endfilter %}",
        "{{ lipsum(n=1000000) }}",
    ],
)
def test_templates_without_end_are_stopped(source):
    with pytest.raises(CumuloError):
        ChatTemplate(source).render([USER])


def test_a_long_honest_conversation_stays_inside_the_budget():
    messages = [USER, {"role": "assistant", "content": "word " * 200}] * 1000
    [expected], _ = peers.transformers.utils.chat_template_utils.render_jinja_template(
        [messages], chat_template=MISTRAL, **TOKENS
    )
    assert ChatTemplate(MISTRAL, TOKENS).render(messages) == expected
