"""The HTTP client: connections that are kept open between requests."""

import asyncio

import httpx
import uvicorn

from app.client.http import KEEP_ALIVE_SECONDS, HTTPClient, Remedies


def test_idle_connection_is_closed_before_the_server_closes_it() -> None:
    """A server that closes a connection while a request is sent on it resets the request."""

    async def main() -> float | None:
        client = HTTPClient("http://127.0.0.1:9", None, Remedies(""), answer_seconds=1.0)
        transport = client._http._transport
        assert isinstance(transport, httpx.AsyncHTTPTransport)
        await client.close()
        return transport._pool._keepalive_expiry

    assert asyncio.run(main()) == KEEP_ALIVE_SECONDS < uvicorn.Config("").timeout_keep_alive / 2
