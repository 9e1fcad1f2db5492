"""aider, over LiteLLM's providers for OpenAI's API and for Ollama's. It prints replies as they arrive."""

import json

from tests.clients.agents.agent import Agent, Asked, Start, main

PRICES = ".aider/caches/model_prices_and_context_window.json"  # fetched if missing
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


def start(asked: Asked) -> Start:
    """The provider is the dialect of the row."""
    provider = "ollama_chat" if asked.dialect == "ollama" else "openai"
    environment = {
        "OPENAI_API_BASE": f"{asked.url}/v1",
        "OPENAI_API_KEY": "none",
        "OLLAMA_API_BASE": asked.url,
    }
    command = ["aider", *SETTINGS, "--model", f"{provider}/{asked.model}", "--message", asked.prompt]
    return Start(command, environment, {PRICES: json.dumps({"none": {}})})


if __name__ == "__main__":
    main(Agent(start, too_long="has hit a token limit|exceeded max context length"))
