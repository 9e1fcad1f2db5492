"""Codex CLI with the Responses API. `codex exec` prints complete messages."""

from tests.clients.agents.agent import Agent, Invocation, Request, main

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


def invocation(request: Request) -> Invocation:
    """Return the command that runs Codex, with the configuration in docs/integrations.md. Plugins are off, because
    Codex would download them.
    """
    config = CONFIG.format(model=request.model, context=request.context, url=request.url)
    return Invocation(["codex", "exec", "--skip-git-repo-check", request.prompt], files={".codex/config.toml": config})


if __name__ == "__main__":
    main(Agent(invocation, too_long="ran out of room in the model's context window"))
