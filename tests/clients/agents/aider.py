"""aider with LiteLLM's providers for OpenAI's and Ollama's APIs. It prints replies as they arrive."""

import json

from tests.clients.agents.agent import Agent, Invocation, Request, main

PRICES = ".aider/caches/model_prices_and_context_window.json"  # aider downloads this file if it is missing
SETTINGS = [
    "--analytics-disable",
    "--no-auto-commits",
    "--no-check-update",
    "--no-git",
    "--no-pretty",
    "--no-show-model-warnings",
    "--no-show-release-notes",
    "--yes-always",
]


def invocation(request: Request) -> Invocation:
    """Return the command that runs aider, with the provider for the dialect of the request."""
    provider = "ollama_chat" if request.dialect == "ollama" else "openai"
    environment = {
        "OPENAI_API_BASE": f"{request.url}/v1",
        "OPENAI_API_KEY": "none",
        "OLLAMA_API_BASE": request.url,
    }
    command = ["aider", *SETTINGS, "--model", f"{provider}/{request.model}", "--message", request.prompt]
    return Invocation(command, environment, {PRICES: json.dumps({"none": {}})})


if __name__ == "__main__":
    main(Agent(invocation, too_long="has hit a token limit|exceeded max context length"))
