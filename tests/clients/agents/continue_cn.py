"""Continue's command line, cn. With -p it prints whole replies."""

from pathlib import Path

from tests.clients.agents.agent import Agent, Asked, Start, main

CONFIG = """\
name: ingle
version: 1.0.0
schema: v1
models:
  - name: ingle
    provider: ollama
    model: {model}
    apiBase: {url}
    roles: [chat]
    capabilities: [tool_use]
    defaultCompletionOptions:
      contextLength: {context}
      maxTokens: 1024
"""


def start(asked: Asked) -> Start:
    """With the configuration of docs/integrations.md. cn reads its --config from the folder of the project."""
    Path("config.yaml").write_text(CONFIG.format(**vars(asked)), encoding="utf-8")
    environment = {
        "CONTINUE_TELEMETRY_ENABLED": "0",
        "CONTINUE_CLI_ENABLE_TELEMETRY": "0",
        "CONTINUE_METRICS_ENABLED": "0",
    }
    return Start(["cn", "--config", "config.yaml", "-p", asked.prompt], environment)


if __name__ == "__main__":
    main(Agent(start, too_long="the context holds|maximum context length"))
