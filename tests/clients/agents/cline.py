"""cline."""

import json
from collections.abc import Sequence

from tests.clients.agents.agent import Agent, Asked, Start, json_lines, main


def start(asked: Asked) -> Start:
    """With the settings that `cline auth openai-compatible` writes."""
    settings = {
        "provider": "openai-compatible",
        "apiKey": "none",
        "model": asked.model,
        "baseUrl": f"{asked.url}/v1",
    }
    providers = {
        "version": 1,
        "lastUsedProvider": "openai-compatible",
        "modes": {},
        "providers": {
            "openai-compatible": {
                "settings": settings,
                "tokenSource": "manual",
                "updatedAt": "2000-01-01T00:00:00.000Z",
            }
        },
    }
    command = ["cline", "--json", "-P", "openai-compatible", "-m", asked.model, asked.prompt]
    environment = {
        "CLINE_SESSION_BACKEND_MODE": "local",  # no daemon that outlives it
        "IS_TEST": "true",  # no feature flags from the network
    }
    files = {
        ".cline/data/settings/providers.json": json.dumps(providers),
        ".cline/data/settings/global-settings.json": json.dumps({"telemetryOptOut": True, "autoUpdateEnabled": False}),
    }
    return Start(command, environment, files)


def pieces(output: str) -> Sequence[str]:
    """Texts of the events of its agent."""
    events = [line.get("event") for line in json_lines(output) if line.get("type") == "agent_event"]
    return [
        event["text"]
        for event in events
        if isinstance(event, dict) and event.get("type") == "content_start" and event.get("contentType") == "text"
    ]


if __name__ == "__main__":
    main(Agent(start, pieces, too_long="overflow_recovery"))
