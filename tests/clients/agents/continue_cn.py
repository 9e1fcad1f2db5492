"""Continue's command line, cn, with Ollama's API. With -p it prints complete replies."""

from pathlib import Path

from tests.clients.agents.agent import Agent, Invocation, Request, main

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


def invocation(request: Request) -> Invocation:
    """Return the command that runs cn, with the configuration in docs/integrations.md. cn reads --config relative to
    the project folder.
    """
    Path("config.yaml").write_text(CONFIG.format(**vars(request)), encoding="utf-8")
    environment = {
        "CONTINUE_TELEMETRY_ENABLED": "0",
        "CONTINUE_CLI_ENABLE_TELEMETRY": "0",
        "CONTINUE_METRICS_ENABLED": "0",
    }
    return Invocation(["cn", "--config", "config.yaml", "-p", request.prompt], environment)


if __name__ == "__main__":
    main(Agent(invocation, too_long="the context holds|maximum context length"))
