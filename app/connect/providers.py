"""How clients describe this server, both for one process and in their settings files."""

from typing import Any

from app.connect.connection import Connection

PROVIDER = "ingle"  # name of this server in the settings of clients
PROVIDER_TITLE = "Inglenook"


def claude_environment(connection: Connection) -> dict[str, str]:
    """Return the environment variables of Claude Code, without the key."""
    names = ("OPUS", "SONNET", "HAIKU", "FABLE")
    return {
        "ANTHROPIC_BASE_URL": connection.base_url,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": connection.model,
        **{f"ANTHROPIC_DEFAULT_{name}_MODEL": connection.model for name in names},
        "CLAUDE_CODE_SUBAGENT_MODEL": connection.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(connection.context_length),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(connection.output_tokens),
        # lines of the prompt that change with every request would be computed again each time
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def codex_settings(connection: Connection, **key: object) -> dict[str, Any]:
    """Return top-level settings of Codex. `key`: settings of the provider that give it the key."""
    provider = {
        "name": PROVIDER_TITLE,
        "base_url": connection.api_url,
        "wire_api": "responses",
        **key,
        "stream_idle_timeout_ms": 3_600_000,
    }
    return {
        "model": connection.model,
        "model_provider": PROVIDER,
        "model_context_window": connection.context_length,
        "model_providers": {PROVIDER: provider},
    }


def opencode_config(connection: Connection, key: str) -> dict[str, Any]:
    """Return the configuration of opencode."""
    limits = {"context": connection.context_length, "output": connection.output_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER_TITLE,
        "options": {"baseURL": connection.api_url, "apiKey": key},
        "models": {connection.model: {"name": connection.model, "limit": limits}},
    }
    name = f"{PROVIDER}/{connection.model}"
    return {"model": name, "small_model": name, "provider": {PROVIDER: provider}}


def aider_sizes(connection: Connection) -> dict[str, Any]:
    """Return the sizes of the model, as aider and its libraries describe them."""
    return {
        "max_tokens": connection.output_tokens,
        "max_input_tokens": connection.context_length,
        "max_output_tokens": connection.output_tokens,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }


def pi_provider(connection: Connection, key: str) -> dict[str, Any]:
    """Return the provider of pi."""
    return {
        "name": PROVIDER_TITLE,
        "baseUrl": connection.api_url,
        "apiKey": key,
        "api": "openai-completions",
        "models": [
            {
                "id": connection.model,
                "name": connection.model,
                "reasoning": False,
                "input": ["text"],
                "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                "contextWindow": connection.context_length,
                "maxTokens": connection.output_tokens,
            }
        ],
    }


def continue_model(connection: Connection, key: str) -> dict[str, Any]:
    """Return the model in the configuration of Continue."""
    return {
        "name": PROVIDER_TITLE,
        "provider": "openai",
        "model": connection.model,
        "apiBase": connection.api_url,
        "apiKey": key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"] if connection.has_tools else [],
        "defaultCompletionOptions": {
            "contextLength": connection.context_length,
            "maxTokens": connection.output_tokens,
        },
    }


CLINE_PROVIDER = "openai-compatible"


def cline_provider(connection: Connection) -> dict[str, Any]:
    """Return the provider of Cline."""
    settings = {
        "provider": CLINE_PROVIDER,
        "apiKey": connection.sent_key,
        "model": connection.model,
        "baseUrl": connection.api_url,
    }
    return {"settings": settings, "tokenSource": "manual", "updatedAt": "2000-01-01T00:00:00.000Z"}
