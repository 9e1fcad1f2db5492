"""The table of clients: what each of them speaks, needs, and reads when it starts."""

import json
from pathlib import Path

from app.connect import targets
from app.connect.connection import KEY_VARIABLE, Client, Connection, Launch
from app.connect.providers import (
    CLINE_PROVIDER,
    PROVIDER,
    aider_sizes,
    claude_environment,
    cline_provider,
    codex_settings,
    continue_model,
    opencode_config,
    pi_provider,
)
from app.errors import AppError


def _claude(connection: Connection, folder: Path) -> Launch:
    return Launch({**claude_environment(connection), "ANTHROPIC_AUTH_TOKEN": connection.sent_key})


def _codex(connection: Connection, folder: Path) -> Launch:
    values = codex_settings(connection, env_key=KEY_VARIABLE)
    provider = values.pop("model_providers")[PROVIDER]
    values |= {f"model_providers.{PROVIDER}.{key}": value for key, value in provider.items()}
    # a value is TOML, in which numbers and strings are written as in JSON
    flags = [word for key, value in values.items() for word in ("-c", f"{key}={json.dumps(value)}")]
    return Launch({KEY_VARIABLE: connection.sent_key}, tuple(flags))


def _opencode(connection: Connection, folder: Path) -> Launch:
    config = opencode_config(connection, f"{{env:{KEY_VARIABLE}}}")
    return Launch({"OPENCODE_CONFIG_CONTENT": json.dumps(config), KEY_VARIABLE: connection.sent_key})


def _copilot(connection: Connection, folder: Path) -> Launch:
    return Launch(
        {
            "COPILOT_PROVIDER_BASE_URL": connection.api_url,
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_API_KEY": connection.sent_key,
            "COPILOT_MODEL": connection.model,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(connection.context_length - connection.output_tokens),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(connection.output_tokens),
        }
    )


def _aider(connection: Connection, folder: Path) -> Launch:
    model = f"openai/{connection.model}"
    return Launch(
        {
            "AIDER_OPENAI_API_BASE": connection.api_url,
            "AIDER_OPENAI_API_KEY": connection.sent_key,
            "AIDER_MODEL": model,
            "AIDER_WEAK_MODEL": model,
            "AIDER_MODEL_METADATA_FILE": str(folder / "models.json"),
        },
        files={"models.json": json.dumps({model: aider_sizes(connection)})},
    )


def _pi(connection: Connection, folder: Path) -> Launch:
    provider = pi_provider(connection, f"${KEY_VARIABLE}")
    extension = f"export default (pi) => pi.registerProvider({json.dumps(PROVIDER)}, {json.dumps(provider)});\n"
    return Launch(
        {KEY_VARIABLE: connection.sent_key},
        ("-e", str(folder / "ingle.js"), "--provider", PROVIDER, "--model", connection.model),
        {"ingle.js": extension},
    )


def _llm(connection: Connection, folder: Path) -> Launch:
    arguments = ("openai", "endpoint", connection.api_url, "-m", connection.model)
    if connection.key is None:
        return Launch(arguments=arguments)
    # it reads the key from its folder only; an option would show it to other users
    keys = json.dumps({PROVIDER: connection.key})
    return Launch({"LLM_USER_PATH": str(folder)}, (*arguments, "--key", PROVIDER), {"keys.json": keys})


def _continue(connection: Connection, folder: Path) -> Launch:
    model = continue_model(connection, connection.sent_key)
    config = {"name": PROVIDER, "version": "1.0.0", "schema": "v1", "models": [model]}
    # YAML contains JSON
    return Launch(arguments=("--config", str(folder / "config.yaml")), files={"config.yaml": json.dumps(config)})


def _cline(connection: Connection, folder: Path) -> Launch:
    stored = {CLINE_PROVIDER: cline_provider(connection)}
    providers = {"version": 1, "lastUsedProvider": CLINE_PROVIDER, "modes": {}, "providers": stored}
    return Launch(
        arguments=("--data-dir", str(folder), "-P", CLINE_PROVIDER, "-m", connection.model),
        files={"settings/providers.json": json.dumps(providers)},
    )


def _qwen(connection: Connection, folder: Path) -> Launch:
    return Launch(
        {
            "OPENAI_BASE_URL": connection.api_url,
            "OPENAI_API_KEY": connection.sent_key,
            "OPENAI_MODEL": connection.model,
        }
    )


def _goose(connection: Connection, folder: Path) -> Launch:
    return Launch(
        {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": connection.model,
            "GOOSE_CONTEXT_LIMIT": str(connection.context_length),
            "OPENAI_HOST": connection.base_url,
            "OPENAI_API_KEY": connection.sent_key,
        }
    )


def _jetbrains_steps(connection: Connection) -> tuple[str, ...]:
    return (
        "Open Settings, Tools, AI Assistant, Models.",
        f"Under third-party providers, choose LM Studio with the URL {connection.base_url}, and test the connection.",
        f"Select {connection.model} for the core features, and enter a context of {connection.context_length} tokens.",
    )


def _cursor_steps(connection: Connection) -> tuple[str, ...]:
    return (
        "Open Cursor Settings, Models, API Keys.",
        f"Enter {connection.sent_key} as the OpenAI API key, and {connection.api_url} as the override of the base URL.",
        f"Add the model {connection.model}, and turn the other models off.",
        "Some requests of Cursor are sent by its own servers, which cannot reach this machine.",
    )


def _xcode_steps(connection: Connection) -> tuple[str, ...]:
    port = connection.base_url.rpartition(":")[2]
    return (
        "Open Settings, Intelligence, Add a Model Provider, Locally Hosted.",
        f"Enter the port {port} and a description, then select {connection.model}.",
    )


def _open_webui_steps(connection: Connection) -> tuple[str, ...]:
    return (
        "Open Admin Panel, Settings, Connections, and add an OpenAI API connection.",
        f"Enter the URL {connection.api_url} and the key {connection.sent_key}.",
        "In a container, replace 127.0.0.1 with host.docker.internal.",
    )


CLIENTS = (
    Client(
        "claude",
        "Claude Code",
        "anthropic",
        ("claude",),
        "npm install -g @anthropic-ai/claude-code",
        least_context=32_768,
        advised_context=65_536,
        launch=_claude,
        setup=targets.claude,
        has_project_file=True,
        ask=("--max-turns", "2", "-p"),
    ),
    Client(
        "codex",
        "Codex CLI",
        "responses",
        ("codex",),
        "npm install -g @openai/codex",
        least_context=16_384,
        launch=_codex,
        setup=targets.codex,
        ask=("exec", "--skip-git-repo-check"),
    ),
    Client(
        "opencode",
        "opencode",
        "chat",
        ("opencode",),
        "npm install -g opencode-ai",
        least_context=16_384,
        advised_context=65_536,
        launch=_opencode,
        setup=targets.opencode,
        has_project_file=True,
        ask=("run",),
    ),
    Client(
        "copilot",
        "Copilot CLI",
        "chat",
        ("copilot",),
        "npm install -g @github/copilot",
        least_context=32_768,
        advised_context=65_536,
        launch=_copilot,
        ask=("-s", "-p"),
    ),
    Client(
        "vscode",
        "VS Code, Copilot Chat",
        "chat",
        ("code", "code-insiders", "codium"),
        least_context=16_384,
        setup=targets.vscode,
    ),
    Client("zed", "Zed", "llama.cpp", ("zed", "zeditor"), setup=targets.zed),
    Client(
        "continue",
        "Continue",
        "chat",
        ("cn",),
        "npm install -g @continuedev/cli",
        launch=_continue,
        setup=targets.continue_dev,
        ask=("-p",),
    ),
    Client(
        "cline",
        "Cline",
        "chat",
        ("cline",),
        "npm install -g cline",
        least_context=16_384,
        launch=_cline,
        setup=targets.cline,
        ask=("--json",),
    ),
    Client(
        "aider",
        "aider",
        "chat",
        ("aider",),
        "python -m pip install aider-chat",
        needs_tools=False,
        launch=_aider,
        setup=targets.aider,
        has_project_file=True,
        ask=("--yes-always", "--no-git", "--no-stream", "--no-check-update", "--message"),
    ),
    Client(
        "pi",
        "pi",
        "chat",
        ("pi",),
        "npm install -g @earendil-works/pi-coding-agent",
        launch=_pi,
        setup=targets.pi,
        ask=("-p",),
    ),
    Client(
        "llm",
        "llm",
        "chat",
        ("llm",),
        "python -m pip install llm",
        least_context=1024,
        needs_tools=False,
        launch=_llm,
        setup=targets.llm,
        ask=("--no-stream",),
    ),
    Client(
        "qwen",
        "Qwen Code",
        "chat",
        ("qwen",),
        "npm install -g @qwen-code/qwen-code",
        least_context=16_384,
        launch=_qwen,
        setup=targets.qwen,
        has_project_file=True,
        ask=("-p",),
    ),
    Client("droid", "droid", "chat", ("droid",), "npm install -g droid", setup=targets.droid),
    Client("goose", "goose", "chat", ("goose",), launch=_goose, setup=targets.goose, ask=("run", "-t")),
    Client("jetbrains", "JetBrains AI Assistant", "chat", steps=_jetbrains_steps),
    Client("cursor", "Cursor", "chat", ("cursor",), steps=_cursor_steps),
    Client("xcode", "Xcode", "chat", ("xed",), steps=_xcode_steps),
    Client("open-webui", "Open WebUI", "chat", ("open-webui",), needs_tools=False, steps=_open_webui_steps),
)


class NoSuchClient(AppError):
    """No client has this name."""


def find_client(name: str) -> Client:
    """Return the client with a name, or with an executable of this name. Raises NoSuchClient."""
    found = next((client for client in CLIENTS if name == client.name or name in client.programs), None)
    if found is None:
        names = ", ".join(client.name for client in CLIENTS)
        raise NoSuchClient(f"no client is known by the name {name}", f"Choose one of {names}.")
    return found
