"""Qwen Code with OpenAI's API."""

import json
from collections.abc import Sequence

from tests.clients.agents.agent import Agent, Invocation, Request, json_lines, main

SETTINGS = {
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "security": {"auth": {"selectedType": "openai"}},
}


def invocation(request: Request) -> Invocation:
    """Return the command that runs Qwen Code, with the variables for OpenAI-compatible servers."""
    environment = {"OPENAI_BASE_URL": f"{request.url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": request.model}
    flags = ["-o", "stream-json", "--include-partial-messages"] if request.shows_pieces else []
    return Invocation(["qwen", *flags, request.prompt], environment, {".qwen/settings.json": json.dumps(SETTINGS)})


def pieces(output: str) -> Sequence[str]:
    """Return the text deltas of the stream events in the output."""
    events = [line["event"] for line in json_lines(output) if line.get("type") == "stream_event"]
    deltas = [event["delta"] for event in events if isinstance(event, dict) and "delta" in event]
    return [delta["text"] for delta in deltas if delta.get("type") == "text_delta"]


if __name__ == "__main__":
    main(Agent(invocation, pieces, too_long="the context holds|maximum context length"))
