"""Where an engine hands KV over: `unix:PATH` on one host, `tcp:HOST:PORT` between hosts. The configuration checks
it, and both ends of a transfer ask."""

from collections.abc import Sequence

from cumulo.errors import CumuloError

Address = str | tuple[str, int]  # a path, or a host and its port
_LONGEST_PATH = 107  # what Linux takes


def parse_address(text: str) -> Address:
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and len(rest.encode()) > _LONGEST_PATH:
        raise CumuloError(
            f"the path of a socket has up to {_LONGEST_PATH} bytes, and {text!r} has {len(rest.encode())}: choose "
            "a shorter one"
        )
    if scheme == "unix" and rest:
        return rest
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdigit() and int(port) < 1 << 16:
        return host.strip("[]"), int(port)
    raise CumuloError(f"an engine's transfer address is unix:PATH or tcp:HOST:PORT; got {text!r}")


def named_address(text: str, number: int) -> tuple[str, str]:
    """Of `NAME=ADDRESS`, or of an address alone, a prefill engine's name and address."""
    name, equals, address = text.partition("=")
    return (name, address) if equals else (f"prefill-{number}", text)


def named_addresses(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Of all prefill engines, each with a name and an address of its own."""
    found = [named_address(text, number) for number, text in enumerate(texts)]
    for what, values in (("name", [name for name, _ in found]), ("address", [where for _, where in found])):
        twice = next((one for one in values if values.count(one) > 1), None)
        if twice is not None:
            raise CumuloError(f"two prefill engines have the {what} {twice!r}: give each its own {what}")
    return found
