"""The stdio transport of MCP servers. test_server.py has the tests with running servers."""

import asyncio

from app.mcp.stdio import _completed


def test_stopping_a_server_survives_cancellations() -> None:
    stopped: list[bool] = []

    async def stop() -> None:
        await asyncio.sleep(0.05)
        stopped.append(True)

    async def scenario() -> None:
        task = asyncio.create_task(_completed(stop()))
        for _ in range(3):
            await asyncio.sleep(0.01)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(scenario())
    assert stopped == [True]
