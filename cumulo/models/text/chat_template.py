"""ChatTemplate: a model's own jinja2 template that turns messages into a prompt. Used by `Tokenizer`.

What goes wrong in a template is the model's fault (it is no valid template, or tries what it must not) or the
messages' (it refuses them); the errors say which. A template comes with a model's files: it is someone else's
program. jinja2's immutable sandbox keeps it from reaching Python's internals and from changing what it is given. It
does not keep it from looping for hours or filling the memory, so it is compiled and run in a process with limits on
time and memory. All templates share two such processes, which start at the first rendering and stay.
"""

import atexit
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from queue import Empty, LifoQueue
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cumulo.base.sandbox.worker import MIB, JobEnded, JobFailed, Limits, Worker, WorkerUnavailable
from cumulo.errors import InvalidRequest, ModelError

# A template only computes: where the clock ends one the machine is busy, which is not the template's fault.
LIMITS = Limits(cpu_s=2.0, wall_s=60.0, memory_bytes=512 * MIB, nice_after_s=0.5)
MAX_SOURCE_CHARACTERS = 128 * 1024  # the longest ones in use have about 30,000
_WORKERS = 2
_PATIENCE_S = 120.0  # for a free worker: both are busy with templates that will be ended
_MOST_OWN_CHARACTERS = 256_000  # in a prompt, beside what callers wrote: the prompt is tokenised outside
_COMPILED = 8  # templates a worker keeps

OTHER = "give another one with --chat-template"


class Stopped(ModelError):
    """The template was ended because of what it did."""


def render_apart(source: str, special_tokens: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """Run a template. ModelError where it is at fault, InvalidRequest where the messages are."""
    job = (source, dict(special_tokens), dict(values))
    try:
        with _worker() as worker:
            try:
                reply, text = worker.call(job, LIMITS)
            except ValueError:  # not made of plain values: what else can be read like them becomes so
                reply, text = worker.call(_plain(job), LIMITS)
    except JobEnded as error:
        kind = Stopped if error.reason in ("cpu time", "memory", "stack") else ModelError
        raise kind(f"the model's chat template was stopped: {error.words}; {OTHER}") from error
    except JobFailed as error:
        raise ModelError(f"the model's chat template cannot be run ({error}); {OTHER}") from error
    except WorkerUnavailable as error:
        raise ModelError(f"chat templates cannot be run now: {error}") from error
    if "fault" in reply:
        raise _error(str(reply["fault"]), str(reply.get("why", "")))
    return text.decode("utf-8", "surrogatepass")


def _error(fault: str, why: str) -> Exception:
    if fault == "refused":
        return InvalidRequest(f"the model's chat template refuses these messages: {why}")
    if fault == "fails":
        return InvalidRequest(
            f"the model's chat template fails on these messages ({why}); check roles and contents, or give another "
            "template with --chat-template"
        )
    if fault == "syntax":
        return ModelError(f"the model's chat template is not valid jinja2 ({why}); {OTHER}")
    return ModelError(f"the model's chat template was stopped: {why}; {OTHER}")


def _plain(value: Any, depth: int = 0) -> Any:
    """Mappings, sequences and texts of other types as dictionaries, lists and strings."""
    if depth > 200:
        raise InvalidRequest("the messages or tools are nested too deeply")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, bytes)):
        return str(value) if isinstance(value, str) else bytes(value)
    if isinstance(value, Mapping):
        return {_plain(key, depth + 1): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (Sequence, set, frozenset)):
        return [_plain(item, depth + 1) for item in value]
    raise InvalidRequest(
        f"a chat template gets texts, numbers, lists and dictionaries, not {type(value).__name__}"
    )


# -- the workers of this program --------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def _workers() -> LifoQueue[Worker]:
    """The free ones; that used last comes first, so that an idle program has one process."""
    free: LifoQueue[Worker] = LifoQueue()
    for _ in range(_WORKERS):
        worker = Worker("cumulo.models.text.chat_template:make")
        atexit.register(worker.close)
        free.put(worker)
    return free


os.register_at_fork(after_in_child=_workers.cache_clear)  # the workers are the parent's


@contextmanager
def _worker() -> Iterator[Worker]:
    free = _workers()
    try:
        worker = free.get(timeout=_PATIENCE_S)
    except Empty:
        raise WorkerUnavailable("all of their workers are busy; try again") from None
    try:
        yield worker
    finally:
        free.put(worker)


# -- in the worker ----------------------------------------------------------------------------------------------
class TemplateRefusal(Exception):
    """raise_exception('...') inside a template."""


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; here it is text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter as transformers defines it: jinja2's own would escape characters for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def template_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def make(setup: Any) -> Any:
    environment = template_environment()
    compiled: OrderedDict[str, jinja2.Template] = OrderedDict()

    def work(job: tuple[str, dict[str, str], dict[str, Any]]) -> tuple[dict[str, Any], bytes]:
        source, special_tokens, values = job
        try:
            if source not in compiled:
                compiled[source] = environment.from_string(source)
                if len(compiled) > _COMPILED:
                    compiled.popitem(last=False)
            text = compiled[source].render({**special_tokens, **values})
            most = 8 * len(repr(values)) + _MOST_OWN_CHARACTERS
            if len(text) > most:
                why = f"it wrote {len(text):,} characters, more than {most:,}, for messages this long"
                return {"fault": "stopped", "why": why}, b""
            return {}, text.encode("utf-8", "surrogatepass")
        except jinja2.TemplateSyntaxError as error:
            return {"fault": "syntax", "why": f"line {error.lineno}: {error.message}"}, b""
        except SecurityError as error:
            return {"fault": "stopped", "why": str(error)}, b""
        except TemplateRefusal as error:
            return {"fault": "refused", "why": str(error)}, b""
        except RecursionError:
            return {"fault": "stopped", "why": "it recurses without end, or is nested too deeply"}, b""
        except MemoryError:
            raise  # the worker counts it as a broken limit
        except Exception as error:  # any Python error the template's own operations can raise
            return {"fault": "fails", "why": f"{type(error).__name__}: {error}"[:2000]}, b""

    return work


Message = Mapping[str, Any]

_MOST_STOPS = 2  # of small conversations; after these the template is not run again
_SMALL_CHARACTERS = 100_000


class ChatTemplate:
    """Compiled on first use: a broken template must not keep a model from plain generation."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._stops = 0
        self._verdict: str | None = None  # why it is not run any more
        if len(source) > MAX_SOURCE_CHARACTERS:
            self._verdict = (
                f"the model's chat template has {len(source):,} characters; at most {MAX_SOURCE_CHARACTERS:,} are "
                f"accepted: {OTHER}"
            )
            source = ""  # whoever reads it in this process takes no time
        self.source = source
        self.special_tokens = dict(special_tokens or {})  # the template's variables bos_token, eos_token, ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        checked = _checked(messages)
        if self._verdict is not None:
            raise ModelError(self._verdict)
        values = {
            **variables,
            "messages": checked,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render_apart(self.source, self.special_tokens, values)
        except Stopped as error:
            self._count_stop(str(error), checked, tools)
            raise

    def _count_stop(self, why: str, messages: list[dict[str, Any]], tools: Any) -> None:
        """A template that cannot even do small conversations will never do: others need not wait for it again.
        One that is slow for large ones only is not judged by them."""
        if sum(len(str(message.get("content"))) for message in messages) < _SMALL_CHARACTERS and (
            not tools or len(str(tools)) < _SMALL_CHARACTERS
        ):
            self._stops += 1
        if self._stops >= _MOST_STOPS:
            self._verdict = f"{why} (it was stopped {self._stops} times and is not run again)"


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as plain dictionaries; contents given as a list of text parts become one text."""
    if type(messages) is not list and (  # abstract classes are slow to ask
        isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence)
    ):
        raise InvalidRequest("messages must be a list of {'role': ..., 'content': ...}")
    if not messages:
        raise InvalidRequest("messages is empty; give at least one {'role': 'user', 'content': ...}")
    result = []
    for index, message in enumerate(messages):
        is_mapping = type(message) is dict or isinstance(message, Mapping)
        if not is_mapping or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{index}] has no role; write {{'role': 'user', 'content': ...}}")
        plain = dict(message)
        content = plain.get("content")
        if type(content) is str:
            pass
        elif isinstance(content, (list, tuple)) and all(
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            plain["content"] = "\n".join(part["text"] for part in content)
        elif content is not None and not isinstance(content, (str, list, tuple)):
            raise InvalidRequest(f"messages[{index}].content must be text, got {type(content).__name__}")
        result.append(plain)
    return result
