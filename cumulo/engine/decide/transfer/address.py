"""Where an engine hands KV over: `unix:PATH` on one host, `tcp:HOST:PORT` between hosts. The configuration checks
it, and both ends of a transfer ask."""

from cumulo.errors import CumuloError

Address = str | tuple[str, int]  # a path, or a host and its port


def parse_address(text: str) -> Address:
    scheme, _, rest = text.partition(":")
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
