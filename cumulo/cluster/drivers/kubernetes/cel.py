"""The rules inside schemas (x-kubernetes-validations), written in CEL: `self.min <= self.max`. Called by the check
of schemas.

The part of the language that such rules use: comparisons, arithmetic, `&&`, `||`, `!`, `? :`, `in`, lists, `has`,
`size`, and the macros `all`, `exists`, `exists_one`, `filter` and `map`. A rule that compares with the object as it
was (`oldSelf`), or that uses something else, is not judged.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>&&|\|\||==|!=|<=|>=|[-+*/%<>!?:.,()\[\]]))"
)
_MACROS = {"all", "exists", "exists_one", "filter", "map"}
Names = Mapping[str, Any]
Term = Callable[[Names], Any]


class CelUnknown(Exception):
    """The rule cannot be judged: it has a form that is not known here."""


class CelMissing(Exception):
    """A field that the rule reads is not there: an API server refuses the object then."""


def keeps_rule(rule: str, value: Any) -> bool:
    """Whether the value keeps the rule; True where that cannot be judged."""
    if "oldSelf" in rule:
        return True
    try:
        return bool(_parsed(rule)({"self": value}))
    except CelMissing:
        return False
    except (CelUnknown, TypeError, AttributeError, KeyError, IndexError):
        return True


@lru_cache(256)
def _parsed(rule: str) -> Term:
    tokens, place = [], 0
    rule = rule.strip()
    while place < len(rule):
        match = _TOKEN.match(rule, place)
        if match is None:
            raise CelUnknown(rule)
        tokens.append((str(match.lastgroup), match.group(str(match.lastgroup))))
        place = match.end()
    parser = _Parser(tokens)
    term = parser.choice()
    if parser.left:
        raise CelUnknown(rule)
    return term


class _Parser:
    """By precedence: choice ? : , or, and, comparison, sum, product, sign, member, primary."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.left = tokens[::-1]

    def _peek(self) -> str:
        return self.left[-1][1] if self.left and self.left[-1][0] != "text" else ""

    def _take(self, *wanted: str) -> str:
        if self._peek() in wanted:
            return self.left.pop()[1]
        return ""

    def _need(self, sign: str) -> None:
        if not self._take(sign):
            raise CelUnknown(sign)

    def choice(self) -> Term:
        test = self._either()
        if not self._take("?"):
            return test
        yes = self.choice()
        self._need(":")
        no = self.choice()
        return lambda names: yes(names) if test(names) else no(names)

    def _either(self) -> Term:
        first = self._both()
        while self._take("||"):
            first = _or(first, self._both())
        return first

    def _both(self) -> Term:
        first = self._comparison()
        while self._take("&&"):
            first = _and(first, self._comparison())
        return first

    def _comparison(self) -> Term:
        first = self._sum()
        while sign := self._take("==", "!=", "<=", ">=", "<", ">", "in"):
            first = _operation(sign, first, self._sum())
        return first

    def _sum(self) -> Term:
        first = self._product()
        while sign := self._take("+", "-"):
            first = _operation(sign, first, self._product())
        return first

    def _product(self) -> Term:
        first = self._signed()
        while sign := self._take("*", "/", "%"):
            first = _operation(sign, first, self._signed())
        return first

    def _signed(self) -> Term:
        if self._take("!"):
            inner = self._signed()
            return lambda names: not inner(names)
        if self._take("-"):
            inner = self._signed()
            return lambda names: -inner(names)
        return self._member(self._primary())

    def _member(self, first: Term) -> Term:
        while True:
            if self._take("."):
                kind, name = self.left.pop()
                if kind != "name":
                    raise CelUnknown(name)
                first = self._called(first, name) if self._take("(") else _field(first, name)
            elif self._take("["):
                first = _item(first, self.choice())
                self._need("]")
            else:
                return first

    def _called(self, owner: Term, name: str) -> Term:
        if name in _MACROS:
            variable = self.left.pop()[1]
            self._need(",")
            body = self.choice()
            self._need(")")
            return _macro(name, owner, variable, body)
        given = self._arguments(")")
        if name == "size" and not given:
            return lambda names: len(owner(names))
        if name in ("startsWith", "endsWith", "contains", "matches") and len(given) == 1:
            return _text_test(name, owner, given[0])
        raise CelUnknown(name)

    def _primary(self) -> Term:
        if not self.left:
            raise CelUnknown("end")
        kind, text = self.left.pop()
        if kind == "number":
            number = float(text) if "." in text else int(text)
            return lambda names: number
        if kind == "text":
            inside = re.sub(r"\\(.)", r"\1", text[1:-1])
            return lambda names: inside
        if text == "(":
            inner = self.choice()
            self._need(")")
            return inner
        if text == "[":
            items = self._arguments("]")
            return lambda names: [one(names) for one in items]
        if kind != "name":
            raise CelUnknown(text)
        return self._named(text)

    def _named(self, name: str) -> Term:
        if name in ("true", "false", "null"):
            value = {"true": True, "false": False, "null": None}[name]
            return lambda names: value
        if self._take("("):
            (inner,) = self._arguments(")")
            if name == "has":
                return _has(inner)
            if name == "size":
                return lambda names: len(inner(names))
            if name in ("int", "string", "double"):
                make = {"int": int, "string": str, "double": float}[name]
                return lambda names: make(inner(names))
            raise CelUnknown(name)
        return lambda names: names[name]

    def _arguments(self, end: str) -> list[Term]:
        found: list[Term] = []
        while not self._take(end):
            found.append(self.choice())
            if not self._take(","):
                self._need(end)
                break
        return found


def _decided_by(first: Term, second: Term, decides: bool) -> Term:
    """In CEL either side may decide, also where the other one fails."""

    def value(names: Names) -> bool:
        try:
            if bool(first(names)) is decides:
                return decides
        except CelMissing:
            if bool(second(names)) is decides:
                return decides
            raise
        return bool(second(names))

    return value


def _or(first: Term, second: Term) -> Term:
    return _decided_by(first, second, True)


def _and(first: Term, second: Term) -> Term:
    return _decided_by(first, second, False)


def _field(owner: Term, name: str) -> Term:
    def value(names: Names) -> Any:
        found = owner(names)
        if not isinstance(found, dict) or name not in found:
            raise CelMissing(name)
        return found[name]

    return value


def _has(inner: Term) -> Term:
    def there(names: Names) -> bool:
        try:
            inner(names)
        except CelMissing:
            return False
        return True

    return there


def _item(owner: Term, index: Term) -> Term:
    return lambda names: owner(names)[index(names)]


def _macro(name: str, owner: Term, variable: str, body: Term) -> Term:
    def value(names: Names) -> Any:
        items = owner(names)
        found = [(one, body({**names, variable: one})) for one in items]
        if name == "all":
            return all(kept for _, kept in found)
        if name == "exists":
            return any(kept for _, kept in found)
        if name == "exists_one":
            return sum(bool(kept) for _, kept in found) == 1
        return [one for one, kept in found if kept] if name == "filter" else [kept for _, kept in found]

    return value


def _text_test(name: str, owner: Term, given: Term) -> Term:
    tests: dict[str, Callable[[str, str], bool]] = {
        "startsWith": str.startswith,
        "endsWith": str.endswith,
        "contains": lambda text, part: part in text,
        "matches": lambda text, pattern: re.search(pattern, text) is not None,
    }
    return lambda names: tests[name](owner(names), given(names))


def _operation(sign: str, first: Term, second: Term) -> Term:
    operations: dict[str, Callable[[Any, Any], Any]] = {
        "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "<=": lambda a, b: a <= b,
        ">=": lambda a, b: a >= b, "<": lambda a, b: a < b, ">": lambda a, b: a > b, "in": lambda a, b: a in b,
        "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
        "%": lambda a, b: a % b,
    }  # fmt: skip
    return lambda names: operations[sign](first(names), second(names))
