"""Codex CLI. `codex exec` prints whole messages."""

from tests.clients.agents.agent import Agent, Asked, Start, main

CONFIG = """\
model = "{model}"
model_provider = "ingle"
model_context_window = {context}
check_for_update_on_startup = false

[analytics]
enabled = false

[features]
apps = false
plugins = false
remote_plugin = false

[model_providers.ingle]
name = "Inglenook"
base_url = "{url}/v1"
wire_api = "responses"
"""


def start(asked: Asked) -> Start:
    """With the configuration of docs/integrations.md, and without its plugins, which come from the network."""
    config = CONFIG.format(model=asked.model, context=asked.context, url=asked.url)
    return Start(["codex", "exec", "--skip-git-repo-check", asked.prompt], files={".codex/config.toml": config})


if __name__ == "__main__":
    main(Agent(start, too_long="ran out of room in the model's context window"))
