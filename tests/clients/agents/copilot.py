"""Copilot CLI with a provider of one's own, over chat completions."""

from collections.abc import Sequence

from tests.clients.agents.agent import Agent, Asked, Start, json_lines, main

OUTPUT_TOKENS = 4096


def start(asked: Asked) -> Start:
    """Offline, which switches telemetry, updates and GitHub off."""
    environment = {
        "COPILOT_OFFLINE": "true",
        "COPILOT_AUTO_UPDATE": "false",
        "COPILOT_PROVIDER_BASE_URL": f"{asked.url}/v1",
        "COPILOT_MODEL": asked.model,
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(asked.context - OUTPUT_TOKENS),
        "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(OUTPUT_TOKENS),
    }
    flags = ["--output-format", "json"] if asked.shows_pieces else ["-s"]
    return Start(["copilot", *flags, "--allow-all-tools", "-p", asked.prompt], environment)


def pieces(output: str) -> Sequence[str]:
    """Deltas of the assistant's message."""
    deltas = [line["data"] for line in json_lines(output) if line.get("type") == "assistant.message_delta"]
    return [delta["deltaContent"] for delta in deltas if isinstance(delta, dict)]


if __name__ == "__main__":
    main(Agent(start, pieces, too_long="rejected the prompt as too long"))
