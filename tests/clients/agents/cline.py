"""cline with its provider for OpenAI-compatible servers."""

import json
from collections.abc import Sequence

from tests.clients.agents.agent import Agent, Invocation, Request, json_lines, main


def invocation(request: Request) -> Invocation:
    """Return the command that runs Cline, with the settings that `cline auth openai-compatible` writes."""
    settings = {
        "provider": "openai-compatible",
        "apiKey": "none",
        "model": request.model,
        "baseUrl": f"{request.url}/v1",
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
    command = ["cline", "--json", "-P", "openai-compatible", "-m", request.model, request.prompt]
    environment = {
        "CLINE_SESSION_BACKEND_MODE": "local",  # start no daemon, because it would keep running
        "IS_TEST": "true",  # download no feature flags
    }
    files = {
        ".cline/data/settings/providers.json": json.dumps(providers),
        ".cline/data/settings/global-settings.json": json.dumps({"telemetryOptOut": True, "autoUpdateEnabled": False}),
    }
    return Invocation(command, environment, files)


def pieces(output: str) -> Sequence[str]:
    """Return the texts of the agent events in the output."""
    events = [line.get("event") for line in json_lines(output) if line.get("type") == "agent_event"]
    return [
        event["text"]
        for event in events
        if isinstance(event, dict) and event.get("type") == "content_start" and event.get("contentType") == "text"
    ]


if __name__ == "__main__":
    main(Agent(invocation, pieces, too_long="overflow_recovery"))
