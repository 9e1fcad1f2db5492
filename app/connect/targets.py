"""The files and values that connect each client to the server until `ingle disconnect`.

A key is given by the means of the client: a command, a file, or a variable. A key itself is only written for clients
that have no such means, to a file that no other user can read.
"""

import json
import shlex
from pathlib import Path

from app.connect.connection import KEY_VARIABLE, NO_KEY, Connection, Setup, Target
from app.connect.documents import Item, KeyPath
from app.connect.providers import (
    CLINE_PROVIDER,
    PROVIDER,
    PROVIDER_TITLE,
    aider_sizes,
    claude_environment,
    cline_provider,
    codex_settings,
    continue_model,
    opencode_config,
    pi_provider,
)
from app.settings.places import Places

_VS_CODES = ("Code", "Code - Insiders", "VSCodium")  # their folders of settings
_STORED_KEY = "ingleApiKey"  # name of the key in the private storage of VS Code


def claude(connection: Connection, places: Places) -> Setup:
    folder, name = places.claude, "settings.json"
    if places.project is not None:
        folder, name = places.project / ".claude", "settings.local.json"
    values: dict[KeyPath, object] = {("env", key): value for key, value in claude_environment(connection).items()}
    if connection.key is None:
        values["env", "ANTHROPIC_AUTH_TOKEN"] = NO_KEY
    else:
        values["apiKeyHelper",] = _key_command(places)
    return Setup((Target(folder / name, "json", values),))


def codex(connection: Connection, places: Places) -> Setup:
    import tomlkit

    catalog = places.codex / "ingle-models.json"
    command, *arguments = _key_words(places)
    key = {} if connection.key is None else {"auth": {"command": command, "args": arguments}}
    settings = {**codex_settings(connection, **key), "model_catalog_json": str(catalog)}
    model = {
        "slug": connection.model,
        "display_name": connection.model,
        "description": f"Served by {PROVIDER_TITLE}",
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "base_instructions": _CODEX_INSTRUCTIONS,
        "support_verbosity": False,
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": connection.context_length,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
    catalog_text = json.dumps({"models": [model]}, indent=2, ensure_ascii=False) + "\n"
    profile = dict(sorted(settings.items(), key=lambda item: isinstance(item[1], dict)))  # tables follow values
    files = (
        Target(places.codex / f"{PROVIDER}.config.toml", "text", {(): tomlkit.dumps(profile)}),
        Target(catalog, "text", {(): catalog_text}),
    )
    return Setup(files, arguments=("--profile", PROVIDER))


_CODEX_INSTRUCTIONS = """\
You are a coding agent in the terminal of the user. Work in the current folder until the task is done.

- Read files before you change them. Change only what the task needs, in the style of the code around it.
- Run commands with the shell tool, and search with rg if it is there.
- Check your work: run the tests, or the program.
- Never undo changes that you did not make, and never commit unless the user asks for it.
- At the end, say in a few sentences what you did.
"""


def opencode(connection: Connection, places: Places) -> Setup:
    folder = places.config / "opencode" if places.project is None else places.project
    key = NO_KEY if connection.key is None else f"{{file:{places.key_file}}}"
    config = opencode_config(connection, key)
    values: dict[KeyPath, object] = {
        ("model",): config["model"],
        ("small_model",): config["small_model"],
        ("provider", PROVIDER): config["provider"][PROVIDER],
    }
    return Setup((Target(_first_existing(folder / "opencode.json", folder / "opencode.jsonc"), "json", values),))


def vscode(connection: Connection, places: Places) -> Setup:
    model = {
        "id": connection.model,
        "name": connection.model,
        "url": f"{connection.api_url}/chat/completions",
        "toolCalling": connection.has_tools,
        "vision": False,
        "maxInputTokens": connection.context_length - connection.output_tokens,
        "maxOutputTokens": connection.output_tokens,
    }
    provider = {
        "name": PROVIDER_TITLE,
        "vendor": "customendpoint",
        "apiKey": NO_KEY if connection.key is None else f"${{input:{_STORED_KEY}}}",
        "apiType": "chat-completions",
        "models": [model],
    }
    folders = [places.programs / name / "User" for name in _VS_CODES]
    existing = [folder for folder in folders if folder.is_dir()] or folders[:1]
    values: dict[KeyPath, object] = {(Item("name", PROVIDER_TITLE),): provider}
    notes = ["Choose the model in the model picker of the chat. Restart VS Code if it is not listed."]
    if connection.key is not None:
        notes.append(f"Enter the key in {places.key_file} in Manage Language Models.")
    return Setup(tuple(Target(folder / "chatLanguageModels.json", "json", values) for folder in existing), tuple(notes))


def zed(connection: Connection, places: Places) -> Setup:
    folder = places.programs / "Zed" if places.is_windows else places.config / "zed"
    values: dict[KeyPath, object] = {
        ("language_models", "llama.cpp", "api_url"): connection.base_url,
        ("agent", "default_model"): {"provider": "llama.cpp", "model": connection.model},
    }
    notes = () if connection.key is None else (f"Enter the key in {places.key_file} in the agent settings.",)
    return Setup((Target(folder / "settings.json", "json", values),), notes)


def continue_dev(connection: Connection, places: Places) -> Setup:
    key = NO_KEY if connection.key is None else f"${{{{ secrets.{KEY_VARIABLE} }}}}"
    path = places.home / ".continue" / "config.yaml"
    values: dict[KeyPath, object] = {("models", Item("name", PROVIDER_TITLE)): continue_model(connection, key)}
    frame: dict[KeyPath, object] = {("name",): "Local Config", ("version",): "1.0.0", ("schema",): "v1"}
    notes = () if connection.key is None else (f"Add {_key_assignment(places)} to {path.with_name('.env')}.",)
    return Setup((Target(path, "yaml", values, frame=frame),), notes)


def cline(connection: Connection, places: Places) -> Setup:
    path = places.home / ".cline" / "data" / "settings" / "providers.json"
    values: dict[KeyPath, object] = {
        ("lastUsedProvider",): CLINE_PROVIDER,
        ("providers", CLINE_PROVIDER): cline_provider(connection),
    }
    frame: dict[KeyPath, object] = {("version",): 1, ("modes",): {}}
    target = Target(path, "json", values, connection.key is not None, frame, refreshed=("updatedAt",))
    return Setup(
        (target,), ("In an editor, enter the same values in the settings of Cline: it does not read this file.",)
    )


def aider(connection: Connection, places: Places) -> Setup:
    folder = places.project or places.home
    model = f"openai/{connection.model}"
    values: dict[KeyPath, object] = {
        ("model",): model,
        ("weak-model",): model,
        ("openai-api-base",): connection.api_url,
    }
    notes: tuple[str, ...] = ()
    if connection.key is None:
        values["openai-api-key",] = NO_KEY
    else:
        notes = (f"{_IN_THE_PROFILE} export AIDER_OPENAI_API_KEY={_key_expansion(places)}",)
    sizes: dict[KeyPath, object] = {(model,): aider_sizes(connection)}
    files = (
        Target(folder / ".aider.conf.yml", "yaml", values),
        Target(folder / ".aider.model.metadata.json", "json", sizes),
    )
    return Setup(files, notes)


def pi(connection: Connection, places: Places) -> Setup:
    key = NO_KEY if connection.key is None else f"!{_key_command(places)}"
    default: dict[KeyPath, object] = {("defaultProvider",): PROVIDER, ("defaultModel",): connection.model}
    files = (
        Target(places.pi / "models.json", "json", {("providers", PROVIDER): pi_provider(connection, key)}),
        Target(places.pi / "settings.json", "json", default),
    )
    return Setup(files)


def llm(connection: Connection, places: Places) -> Setup:
    name = f"{PROVIDER}/{connection.model}"
    model = {
        "model_id": name,
        "model_name": connection.model,
        "api_base": connection.api_url,
        **({} if connection.key is None else {"api_key_name": PROVIDER}),
        "can_stream": True,
        "supports_tools": connection.has_tools,
        "supports_schema": True,
    }
    values: dict[KeyPath, object] = {(Item("model_id", name),): model}
    keys = () if connection.key is None else (f"llm keys set {PROVIDER} --value {_key_expansion(places)}",)
    return Setup((Target(places.llm / "extra-openai-models.yaml", "yaml", values),), keys, ("-m", name))


def qwen(connection: Connection, places: Places) -> Setup:
    folder = (places.project or places.home) / ".qwen"
    model = {
        "id": connection.model,
        "name": connection.model,
        "baseUrl": connection.api_url,
        "envKey": KEY_VARIABLE,
        "generationConfig": {"contextWindowSize": connection.context_length},
    }
    values: dict[KeyPath, object] = {
        ("modelProviders", "openai", Item("id", connection.model)): model,
        ("security", "auth", "selectedType"): "openai",
        ("model", "name"): connection.model,
    }
    notes: tuple[str, ...] = ()
    if connection.key is None:
        values["env", KEY_VARIABLE] = NO_KEY
    else:
        notes = (f"{_IN_THE_PROFILE} export {KEY_VARIABLE}={_key_expansion(places)}",)
    return Setup((Target(folder / "settings.json", "json", values),), notes)


def droid(connection: Connection, places: Places) -> Setup:
    identifier = f"custom:{PROVIDER_TITLE}"
    model = {
        "id": identifier,
        "model": connection.model,
        "displayName": PROVIDER_TITLE,
        "baseUrl": connection.api_url,
        "apiKey": NO_KEY if connection.key is None else f"${{{KEY_VARIABLE}}}",
        "provider": "generic-chat-completion-api",
        "maxOutputTokens": connection.output_tokens,
    }
    values: dict[KeyPath, object] = {
        ("customModels", Item("id", identifier)): model,
        ("sessionDefaultSettings", "model"): identifier,
    }
    notes = () if connection.key is None else (f"{_IN_THE_PROFILE} export {KEY_VARIABLE}={_key_expansion(places)}",)
    return Setup((Target(places.home / ".factory" / "settings.json", "json", values),), notes)


def goose(connection: Connection, places: Places) -> Setup:
    folder = places.config / "goose"
    if places.is_windows:
        folder = places.programs / "Block" / "goose" / "config"
    values: dict[KeyPath, object] = {
        ("GOOSE_MODEL",): connection.model,
        ("GOOSE_CONTEXT_LIMIT",): connection.context_length,
    }
    if connection.key is None:  # its provider for Ollama needs no key
        values |= {("GOOSE_PROVIDER",): "ollama", ("OLLAMA_HOST",): connection.base_url}
        return Setup((Target(folder / "config.yaml", "yaml", values),))
    values |= {("GOOSE_PROVIDER",): "openai", ("OPENAI_HOST",): connection.base_url}
    notes = (f"{_IN_THE_PROFILE} export OPENAI_API_KEY={_key_expansion(places)}",)
    return Setup((Target(folder / "config.yaml", "yaml", values),), notes)


_IN_THE_PROFILE = "In the profile of your shell:"


def _key_words(places: Places) -> list[str]:
    """Return the command that prints the key."""
    return ["cmd", "/c", "type", str(places.key_file)] if places.is_windows else ["cat", str(places.key_file)]


def _key_command(places: Places) -> str:
    return f'type "{places.key_file}"' if places.is_windows else shlex.join(_key_words(places))


def _key_expansion(places: Places) -> str:
    return f'"$({shlex.join(["cat", str(places.key_file)])})"'


def _key_assignment(places: Places) -> str:
    return f"{KEY_VARIABLE}=<the key in {places.key_file}>"


def _first_existing(*paths: Path) -> Path:
    return next((path for path in paths if path.exists()), paths[0])
