"""Settings: what the user chose, resolved once, with the place each value came from.

Precedence: command-line flag > `INGLE_*` environment variable > config.toml > default. This is the only module that
reads the environment; it knows nothing of what the settings are used for.
"""

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

import platformdirs

from app.errors import InvalidSetting
from app.settings.values import (
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


@dataclass(frozen=True)
class Inside:
    """A default: a folder inside that of an earlier setting."""

    setting: str
    name: str


@dataclass(frozen=True)
class Setting:
    """How one setting is read. Its environment variable is `INGLE_` and its name, its config.toml key is its name."""

    parse: Callable[[object], object]  # from a string or a TOML value; raises ValueError with what was expected
    default: object  # the value, a function without arguments that finds it, or a place Inside another setting's
    meaning: str  # one sentence for people
    also: tuple[str, ...]  # variables of other tools, looked at after our own


@dataclass(frozen=True)
class FormerName:
    """A setting under an earlier name, which config.toml and the environment may still have."""

    setting: str  # the name it has now
    parse: Callable[[object], object]  # from a value under the earlier name to the value of the setting


def _read_by(parse: Callable[[object], object], default: object, meaning: str, *also: str) -> dict[str, Setting]:
    """The metadata of a field of Settings."""
    return {"setting": Setting(parse, default, meaning, also)}


def _bits_of_planes(value: object) -> int:
    """The activation bits of a number of planes, which that setting had earlier."""
    return (0, 8, 14)[whole_number(2)(value)]


def _folder(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("must be a path")
    return Path(os.path.expandvars(os.path.expanduser(value))).absolute()


def _hugging_face_home() -> Path:
    """Where Hugging Face tools keep their files, by the rules of huggingface_hub."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _folder(os.environ.get("HF_HOME") or Path(cache, "huggingface"))


def _hugging_face_token() -> str | None:
    """The token that `hf auth login` stored, if any."""
    file = _folder(os.environ.get("HF_TOKEN_PATH") or _hugging_face_home() / "token")
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _ollama_models() -> Path:
    """Those of this user, or of the service that Ollama's installer sets up on Linux."""
    places = [_folder("~/.ollama/models"), Path("/usr/share/ollama/.ollama/models")]
    return next((place for place in places if os.access(place, os.R_OK | os.X_OK)), places[0])


def _lm_studio_models() -> Path:
    """Where LM Studio keeps them, or its older versions did."""
    places = [_folder("~/.lmstudio/models"), _folder("~/.cache/lm-studio/models")]
    return next((place for place in places if place.is_dir()), places[0])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every setting, resolved. Get one from `load_settings`; the fields are the table of what can be set."""

    model: str = field(metadata=_read_by(text, "smollm2:135m", "The model used when none is named."))
    model_aliases: Mapping[str, str] = field(
        metadata=_read_by(
            names,
            MappingProxyType({}),
            'Other names that requests may give models, such as "gpt-4o=smollm2:135m, claude-*=*"; a name may have a * '
            "for whatever stands there, and * alone is whichever model is served.",
        )
    )
    alias: tuple[str, ...] = field(
        metadata=_read_by(
            text_list,
            (),
            "Names that the served model is listed by, the first of which its replies carry; by default its own, and "
            "of a path the last part.",
        )
    )
    models_dir: Path = field(
        metadata=_read_by(
            _folder,
            lambda: platformdirs.user_data_path(APP_NAME, appauthor=False) / "models",
            "Folder of the models that do not come from the Hugging Face Hub, and of the records of all.",
        )
    )
    cache_dir: Path = field(
        metadata=_read_by(
            _folder,
            lambda: platformdirs.user_cache_path(APP_NAME, appauthor=False),
            "Folder of files that can be made again.",
        )
    )
    state_dir: Path = field(
        metadata=_read_by(
            _folder,
            lambda: platformdirs.user_state_path(APP_NAME, appauthor=False),
            "Folder of the records by which a running server is found, and of the responses that it keeps.",
        )
    )
    hub_endpoint: str = field(
        metadata=_read_by(
            web_address,
            "https://huggingface.co",
            "Address of the Hugging Face Hub or of a mirror of it.",
            "HF_ENDPOINT",
        )
    )
    hub_cache: Path = field(
        metadata=_read_by(
            _folder,
            lambda: _hugging_face_home() / "hub",
            "The Hugging Face cache, shared with other tools: models from the Hub are kept there.",
            "HF_HUB_CACHE",
            "HUGGINGFACE_HUB_CACHE",
        )
    )
    hub_token: str | None = field(
        repr=False,
        metadata=_read_by(
            text,
            _hugging_face_token,
            "Access token for gated models; sent to the Hub's own host and nowhere else.",
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
        ),
    )
    ollama_dir: Path = field(
        metadata=_read_by(
            _folder, _ollama_models, "Folder of Ollama's models, which are read in place.", "OLLAMA_MODELS"
        )
    )
    lmstudio_dir: Path = field(
        metadata=_read_by(_folder, _lm_studio_models, "Folder of LM Studio's models, which are read in place.")
    )
    offline: bool = field(
        metadata=_read_by(yes_or_no, False, "Never use the network.", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    threads: int = field(metadata=_read_by(whole_number(MAX_THREADS), 0, "Threads of the CPU engine; 0 chooses."))
    kernels: str = field(
        metadata=_read_by(
            one_of("auto", "cuda", "cpu", "reference"),
            "auto",
            "Kernels of the engine: the fastest ones, or those named.",
        )
    )
    device: str = field(
        metadata=_read_by(
            matching(r"auto|cpu|cuda(:\d{1,3})?", "auto, cpu, cuda or cuda:N"),
            "auto",
            "Where the engine computes: on a GPU where one can be used, or where it is told to.",
        )
    )
    gpu_memory: MemoryLimit = field(
        metadata=_read_by(
            memory_limit,
            ALL_FREE,
            "How much of a GPU's memory an engine takes at most, such as 20GB or 80%; auto is all that is free but for "
            "a reserve.",
        )
    )
    deterministic: bool = field(
        metadata=_read_by(
            yes_or_no, False, "On a GPU, too, a reply is the same bytes alone and among others, at some cost in speed."
        )
    )
    activation_bits: int = field(
        metadata=_read_by(
            one_of_numbers(0, 8, 14),
            0,
            "Bits per activation in the CPU kernels: 8 is faster, 14 is near exact. Default: 0, which chooses by the "
            "size of the model.",
        )
    )
    cpu_tier: str = field(
        metadata=_read_by(
            one_of(*CHOICES),
            "auto",
            "Instructions that the CPU kernels are made of: the fastest this processor has, or those named.",
        )
    )
    quantize: str = field(
        metadata=_read_by(
            one_of("none", "fp8", "int4", "nf4"),
            "none",
            "What the layers of a 16- or 32-bit model are quantized to while it loads.",
        )
    )
    kv_type: str = field(
        metadata=_read_by(
            one_of("auto", "bf16", "f16", "fp8", "int8"),
            "auto",
            "How keys and values are kept: on a CPU f16 is near exact, int8 takes about half of the memory; on a GPU "
            "bf16 and f16, and fp8.",
        )
    )
    kv_host_mb: float | None = field(  # None: auto
        metadata=_read_by(
            number_or_auto(MAX_HOST_MB),
            None,
            "Memory, in MB, that requests which have to wait are copied to; 0 has them computed again; auto is a "
            "quarter of what is free where a GPU computes, and nothing where the CPU does.",
        )
    )
    kv_disk_gb: float | None = field(  # None: auto
        metadata=_read_by(
            number_or_auto(MAX_DISK_GB),
            None,
            "How much is kept on disk of what was computed, in GB: a number, 0 for nothing, or auto for a tenth of "
            "the free space.",
        )
    )
    kv_disk_dir: Path = field(
        metadata=_read_by(_folder, Inside("cache_dir", "kv"), "Folder of what was computed, of all models.")
    )
    keep_changing_lines: bool = field(
        metadata=_read_by(
            yes_or_no,
            False,
            "Keep lines that clients change in their prompts with every request, such as Claude Code's billing header; "
            "otherwise they are left out, so that what follows them is found computed.",
        )
    )
    preemption: str = field(
        metadata=_read_by(
            one_of(*(choice.value for choice in Preemption)),
            Preemption.AUTO.value,
            "What a request does that has to wait while others run: swap, recompute, or what is faster.",
        )
    )
    latency_ms: int = field(
        metadata=_read_by(
            whole_number(MAX_LATENCY_MS),
            round(1000 * TARGET_LATENCY),
            "Pause between two words of a reply, in ms, that reading a long prompt should not exceed; 0 is any.",
        )
    )
    sampling_defaults: str = field(
        metadata=_read_by(
            one_of("model", "none"),
            "model",
            "Sampling of requests that leave it open: what the model recommends, or with none the defaults of the API "
            "that a request came by.",
        )
    )
    generic_tools: bool = field(
        metadata=_read_by(
            yes_or_no,
            True,
            "Tell models of tools as text, and hold their calls to JSON by a grammar, where their chat template has no "
            "place for tools; otherwise such requests are refused.",
        )
    )
    context: int = field(
        metadata=_read_by(
            whole_number(MAX_CONTEXT), 0, "Longest context in tokens; 0 takes what the model was made for."
        )
    )
    host: str = field(
        metadata=_read_by(
            matching(r"[A-Za-z0-9:][A-Za-z0-9.:_-]{0,252}", "an address or a name of this machine"),
            "127.0.0.1",
            "Where the server listens: 127.0.0.1 serves this machine alone; others need an API key.",
        )
    )
    port: int = field(
        metadata=_read_by(whole_number(MAX_PORT), 4645, "Port the server listens on; 0 takes any that is free.")
    )
    ollama_port: int = field(
        metadata=_read_by(
            whole_number(MAX_PORT),
            0,
            "Port on which programs that look for Ollama find the server as well, which is 11434; 0 is none.",
        )
    )
    host_names: tuple[str, ...] = field(
        metadata=_read_by(
            text_list, (), "Further names that requests may call the server by, such as mybox.lan or mybox.lan:8080."
        )
    )
    allowed_origins: tuple[str, ...] = field(
        metadata=_read_by(
            origin_list, (), "Web pages that may use the server, by their origin, such as https://app.example."
        )
    )
    api_key: tuple[str, ...] = field(
        repr=False,
        metadata=_read_by(key_list, (), "Keys that programs need to be served, separated by commas; never a flag."),
    )
    api_key_file: Path | None = field(
        metadata=_read_by(_folder, None, "File of such keys, one a line, which nobody else can read.")
    )
    max_requests: int = field(
        metadata=_read_by(
            whole_number(MAX_REQUESTS),
            DEFAULT_REQUESTS,
            "Requests under way at most for one API key, or for all that need none; 0 is any number.",
        )
    )
    keep_alive_s: int = field(
        metadata=_read_by(
            whole_number(MAX_KEEP_ALIVE_S),
            300,
            "Seconds that the engine of a chat stays for other programs behind their last request; "
            "0 ends it with the last chat.",
        )
    )
    theme: str = field(
        metadata=_read_by(
            text,
            "auto",
            "Colours of the chat in the terminal: a theme by its name, as /theme keeps the one that is chosen there; "
            "auto suits the terminal.",
        )
    )
    origins: Mapping[str, str] = field(default_factory=dict, repr=False)  # setting name -> where its value came from

    def stated(self, name: str) -> str:
        """A setting as it was given: `--context 16384`, `INGLE_CONTEXT=16384`, or `context = 16384 in FILE`."""
        origin, value = self.origins.get(name, "default"), getattr(self, name)
        if origin.startswith("--"):
            return f"{origin} {value}"
        return f"{name} = {value} in {origin}" if origin.endswith(".toml") else f"{origin}={value}"

    @property
    def quantize_method(self) -> str | None:
        """What layers are quantized to while a model loads; None: they stay as they are."""
        return None if self.quantize == "none" else self.quantize

    @property
    def kv_disk_limit(self) -> int | None:
        """Bytes that all of kv_disk_dir may take; 0: nothing is written there. None: chosen by what is free."""
        return None if self.kv_disk_gb is None else round(self.kv_disk_gb * 1_000_000_000)

    @property
    def kv_host_bytes(self) -> int | None:
        """None: chosen by what is free."""
        return None if self.kv_host_mb is None else round(self.kv_host_mb * 1_000_000)

    @property
    def history_dir(self) -> Path:
        """Where chats are kept."""
        return self.state_dir / "history"

    @property
    def replies_dir(self) -> Path | None:
        """Where the ids of replies are kept: beside what was computed for them. None: nowhere."""
        return None if self.kv_disk_limit == 0 else self.kv_disk_dir


SETTINGS: Mapping[str, Setting] = {
    entry.name: entry.metadata["setting"] for entry in fields(Settings) if "setting" in entry.metadata
}
FORMER_NAMES: Mapping[str, FormerName] = {"activation_planes": FormerName("activation_bits", _bits_of_planes)}
SECRETS = frozenset(entry.name for entry in fields(Settings) if entry.name in SETTINGS and not entry.repr)


def setting_named(name: str) -> Setting:
    """Return how a setting is read, by its name or a former name.

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
    """The path of config.toml, whether or not it exists."""
    return platformdirs.user_config_path(APP_NAME, appauthor=False) / "config.toml"


def load_settings(**flags: object) -> Settings:
    """Resolve all settings. `flags` are those given on the command line, by setting name; None means not given.

    Raises InvalidSetting, which names the place the bad value came from.
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
    """The value of one setting and where it came from."""
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
    """Whether the terminal says of itself that it can write lines and nothing else."""
    return os.environ.get("TERM", "") in ("", "dumb")


def wants_colours() -> bool:
    """Whether NO_COLOR is not there, whatever it says: Textual reads it so."""
    return "NO_COLOR" not in os.environ


def child_environment(**overrides: str) -> dict[str, str]:
    """The environment of a child process: our own, with `overrides`."""
    return {**os.environ, **overrides}
