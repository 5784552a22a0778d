"""Chat templates that mean harm are stopped by their worker's limits, and honest ones go on beside them."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cumulo.errors import CumuloError, InvalidRequest, ModelError
from cumulo.models.text import chat_template
from cumulo.models.text.caller_text import sought_texts
from cumulo.models.text.chat_template import ChatTemplate

pytestmark = pytest.mark.long

USER = {"role": "user", "content": "Hi"}
DOUBLING = (
    "{% set ns = namespace(a=['x']) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
)
# Two lists that contain themselves twice over are compared item by item: no check of sizes foresees it.
COMPARING = (
    "{% set ns = namespace(a=['x'], b=['x']) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
)
HONEST = "{{ messages[0].content | trim }}"


@pytest.fixture
def short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a template's time, of which hostile ones use all."""
    monkeypatch.setattr(chat_template, "LIMITS", replace(chat_template.LIMITS, cpu_s=0.5))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(
    "source",
    [
        DOUBLING + "{{ ns.a | string }}",
        DOUBLING + "{{ ns.a | tojson }}",
        "{{ ('a' * 30000000, 'b') | join('c' * 300000000) }}",
        "{{ ('\t' * 1000000).expandtabs(1000000) }}",
        "{{ ('%(a)s' * 1000) % {'a': 'a' * 1000000} }}",
        "{{ '%999999999d' % 1 }}",
        "{{ lipsum(n=10000000) }}",
        "{{ 9999999 ** 99999999 }}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    ],
)
def test_gigabytes_and_hours_are_ended_and_the_next_template_runs(source: str, short_time: None) -> None:
    before = resident_bytes()
    with pytest.raises(CumuloError, match=r"chat template (was stopped|fails)"):
        ChatTemplate(source).render([USER])
    assert ChatTemplate(HONEST).render([USER]) == "Hi"
    assert resident_bytes() < before + (64 << 20)


def test_what_takes_all_the_time_is_ended_and_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch, short_time: None
) -> None:
    runs: list[str] = []
    run = chat_template.render_apart
    monkeypatch.setattr(
        "cumulo.models.text.chat_template.render_apart",
        lambda source, *more: (runs.append(source), run(source, *more))[1],
    )
    template, before = ChatTemplate(COMPARING), resident_bytes()
    for _ in range(2):
        with pytest.raises(ModelError, match=r"stopped: it takes more than .* s of processor time"):
            template.render([USER])
    assert ChatTemplate(HONEST).render([USER]) == "Hi"
    with pytest.raises(ModelError, match="it was stopped 2 times and is not run again"):
        template.render([USER])
    assert runs.count(COMPARING) == 2
    assert resident_bytes() < before + (64 << 20)


def test_honest_templates_are_rendered_while_a_hostile_one_runs(short_time: None) -> None:
    ended: list[str] = []

    def hostile() -> None:
        with pytest.raises(ModelError):
            ChatTemplate(COMPARING).render([USER])
        ended.append("hostile")

    thread = threading.Thread(target=hostile)
    thread.start()
    honest = ChatTemplate(HONEST)
    for _ in range(20):
        assert honest.render([USER]) == "Hi"
    ended.append("honest")
    thread.join()
    assert sorted(ended) == ["honest", "hostile"]


def test_memory_is_bounded_whatever_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        chat_template, "LIMITS", chat_template.Limits(cpu_s=4, wall_s=60, memory_bytes=24 << 20)
    )
    grows = (
        "{% set ns = namespace(a=[]) %}{% for i in range(90000) %}"
        "{% set ns.a = [{'a': i, 'b': 1, 'c': 2, 'd': 3, 'e': 4, 'f': 5, 'more': ns.a}] %}{% endfor %}x"
    )
    # Python 3.11 unwinds its stack with a number that it allocates: where memory ends just there, it tries for ever
    # and the processor time ends that.
    with pytest.raises(
        ModelError, match=r"it needs more than 24 MiB of memory|more than 4 s of processor time"
    ):
        ChatTemplate(grows).render([USER])


@pytest.mark.long
@pytest.mark.parametrize(
    "source",
    ["{{ " + "(" * 30000 + "1" + ")" * 30000 + " }}", "{{ a" + ".b" * 40000 + " }}", "{% if 1 %}" * 5000],
    ids=["brackets", "attributes", "ifs"],
)
def test_templates_nested_very_deeply_are_refused(source: str) -> None:
    with pytest.raises(CumuloError, match="chat template"):
        ChatTemplate(source).render([USER])
    sought_texts(source)


def test_a_template_of_any_size_is_refused_without_reading_it() -> None:
    template = ChatTemplate("{% if 1 %}" * 1_000_000)
    with pytest.raises(ModelError, match="at most 131,072 are accepted"):
        template.render([USER])


def test_a_prompt_much_longer_than_its_messages_is_refused_before_it_is_tokenised() -> None:
    with pytest.raises(ModelError, match="it wrote 9,000,000 characters"):
        ChatTemplate("{{ 'a' * 9000000 }}").render([USER])
    long = "word " * 200_000
    assert ChatTemplate(HONEST).render([{"role": "user", "content": long}]) == long.strip()


def test_values_of_other_types_arrive_as_plain_ones() -> None:
    class Text(str):
        pass

    found = ChatTemplate("{{ mood }} {{ more | tojson }}").render(
        [USER], mood=Text("glad"), more={"a": (1, Text("b")), "c": range(2)}
    )
    assert found == 'glad {"a": [1, "b"], "c": [0, 1]}'
    with pytest.raises(InvalidRequest, match="not object"):
        ChatTemplate(HONEST).render([USER], mood=object())
