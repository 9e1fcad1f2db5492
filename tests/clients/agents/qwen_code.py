"""Qwen Code."""

import json
from collections.abc import Sequence

from tests.clients.agents.agent import Agent, Asked, Start, json_lines, main

SETTINGS = {
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "security": {"auth": {"selectedType": "openai"}},
}


def start(asked: Asked) -> Start:
    """Over OpenAI's API, with its variables."""
    environment = {"OPENAI_BASE_URL": f"{asked.url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": asked.model}
    flags = ["-o", "stream-json", "--include-partial-messages"] if asked.shows_pieces else []
    return Start(["qwen", *flags, asked.prompt], environment, {".qwen/settings.json": json.dumps(SETTINGS)})


def pieces(output: str) -> Sequence[str]:
    """Text deltas of the events that it passes on."""
    events = [line["event"] for line in json_lines(output) if line.get("type") == "stream_event"]
    deltas = [event["delta"] for event in events if isinstance(event, dict) and "delta" in event]
    return [delta["text"] for delta in deltas if delta.get("type") == "text_delta"]


if __name__ == "__main__":
    main(Agent(start, pieces, too_long="the context holds|maximum context length"))
