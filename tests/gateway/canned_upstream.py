"""A gateway in this process in front of a server that answers POST requests with given bytes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import httpx

from cumulo.fleet.remote.options import PoolMember
from cumulo.fleet.remote.replicas import Replicas
from cumulo.gateway.app import GatewayApp
from cumulo.gateway.options import GatewayOptions

MODELS = b'{"data": [{"id": "m"}]}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@contextlib.asynccontextmanager
async def gateway_before(
    answer: Callable[[bytes, bytes], bytes],
    reads: bool = True,
    seen: list[bytes] | None = None,
    **options: object,
) -> AsyncIterator[httpx.AsyncClient]:
    """`answer`: gets the head and the body of a request other than GET /v1/models, and returns what is sent.
    `reads`: whether it reads bodies at all. `seen`: gets the heads of all requests."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if seen is not None:
                    seen.append(head)
                size = head.partition(b"content-length: ")[2].split(b"\r\n")[0]
                body = await reader.readexactly(int(size or 0) if reads else 0)
                counted = HEAD + b"content-length: %d\r\n\r\n%b" % (len(MODELS), MODELS)
                if head.startswith(b"get /internal/"):
                    counted = b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n"
                is_probe = head.startswith((b"get /v1/models ", b"get /internal/"))
                writer.write(counted if is_probe else answer(head, body))
                if not reads and not is_probe:
                    await asyncio.Event().wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        member = PoolMember(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        chosen = GatewayOptions(members=(member,), wait_for_replica_s=0, **options)  # type: ignore[arg-type]
        fleet = Replicas(chosen)
        await fleet.start()
        try:
            transport = httpx.ASGITransport(GatewayApp(chosen, fleet))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                yield client
        finally:
            await fleet.close()
