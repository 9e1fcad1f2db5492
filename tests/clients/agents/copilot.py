"""Copilot CLI with a custom provider and chat completions."""

from collections.abc import Sequence

from tests.clients.agents.agent import Agent, Invocation, Request, json_lines, main

OUTPUT_TOKENS = 4096


def invocation(request: Request) -> Invocation:
    """Return the command that runs Copilot CLI offline, without telemetry, updates, or access to GitHub."""
    environment = {
        "COPILOT_OFFLINE": "true",
        "COPILOT_AUTO_UPDATE": "false",
        "COPILOT_PROVIDER_BASE_URL": f"{request.url}/v1",
        "COPILOT_MODEL": request.model,
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(request.context - OUTPUT_TOKENS),
        "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(OUTPUT_TOKENS),
    }
    flags = ["--output-format", "json"] if request.shows_pieces else ["-s"]
    return Invocation(["copilot", *flags, "--allow-all-tools", "-p", request.prompt], environment)


def pieces(output: str) -> Sequence[str]:
    """Return the deltas of the assistant's message."""
    deltas = [line["data"] for line in json_lines(output) if line.get("type") == "assistant.message_delta"]
    return [delta["deltaContent"] for delta in deltas if isinstance(delta, dict)]


if __name__ == "__main__":
    main(Agent(invocation, pieces, too_long="prompt as too long|maximum context length"))
