"""pi."""

import json
from collections.abc import Sequence

from tests.clients.agents.agent import Agent, Asked, Start, json_lines, main


def start(asked: Asked) -> Start:
    """With a custom provider in models.json."""
    provider = {
        "baseUrl": f"{asked.url}/v1",
        "api": "openai-completions",
        "apiKey": "none",
        "models": [{"id": asked.model, "contextWindow": asked.context, "maxTokens": 4096}],
    }
    environment = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}
    command = ["pi", "--provider", "ingle", "--model", asked.model, "--mode", "json", "-p", asked.prompt]
    return Start(command, environment, {".pi/agent/models.json": json.dumps({"providers": {"ingle": provider}})})


def pieces(output: str) -> Sequence[str]:
    """Text deltas of the updates of a message."""
    events = [line.get("assistantMessageEvent") for line in json_lines(output)]
    return [event["delta"] for event in events if isinstance(event, dict) and event.get("type") == "text_delta"]


if __name__ == "__main__":
    main(Agent(start, pieces, too_long='"compaction_start","reason":"overflow"'))
