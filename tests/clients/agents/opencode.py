"""opencode with its provider for OpenAI-compatible servers. `opencode run` prints complete messages."""

import json

from tests.clients.agents.agent import Agent, Invocation, Request, main


def invocation(request: Request) -> Invocation:
    """Return the command that runs opencode, with a configuration that defines the provider and the model."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Inglenook",
        "options": {"baseURL": f"{request.url}/v1", "apiKey": "none"},
        "models": {request.model: {"limit": {"context": request.context, "output": 4096}}},
    }
    model = f"ingle/{request.model}"
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
    command = ["opencode", "run", "--pure", "--format", "json", request.prompt]
    return Invocation(command, environment, {".config/opencode/opencode.json": json.dumps(config)})


if __name__ == "__main__":
    main(Agent(invocation, too_long="ContextOverflowError"))
