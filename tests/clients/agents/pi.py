"""pi with a custom provider and chat completions."""

import json
from collections.abc import Sequence

from tests.clients.agents.agent import Agent, Invocation, Request, json_lines, main


def invocation(request: Request) -> Invocation:
    """Return the command that runs pi, with the provider in models.json."""
    provider = {
        "baseUrl": f"{request.url}/v1",
        "api": "openai-completions",
        "apiKey": "none",
        "models": [{"id": request.model, "contextWindow": request.context, "maxTokens": 4096}],
    }
    environment = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}
    command = ["pi", "--provider", "ingle", "--model", request.model, "--mode", "json", "-p", request.prompt]
    return Invocation(command, environment, {".pi/agent/models.json": json.dumps({"providers": {"ingle": provider}})})


def pieces(output: str) -> Sequence[str]:
    """Return the text deltas of the message updates in the output."""
    events = [line.get("assistantMessageEvent") for line in json_lines(output)]
    return [event["delta"] for event in events if isinstance(event, dict) and event.get("type") == "text_delta"]


if __name__ == "__main__":
    main(Agent(invocation, pieces, too_long='"compaction_start","reason":"overflow"'))
