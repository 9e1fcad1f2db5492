"""opencode. `opencode run` prints whole messages."""

import json

from tests.clients.agents.agent import Agent, Asked, Start, main


def start(asked: Asked) -> Start:
    """With its provider for OpenAI-compatible servers."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Inglenook",
        "options": {"baseURL": f"{asked.url}/v1", "apiKey": "none"},
        "models": {asked.model: {"limit": {"context": asked.context, "output": 4096}}},
    }
    model = f"ingle/{asked.model}"
    config = {
        "autoupdate": False,
        "share": "disabled",
        "model": model,
        "small_model": model,
        "provider": {"ingle": provider},
    }
    environment = {
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    command = ["opencode", "run", "--pure", "--format", "json", asked.prompt]
    return Start(command, environment, {".config/opencode/opencode.json": json.dumps(config)})


if __name__ == "__main__":
    main(Agent(start, too_long="ContextOverflowError"))
