"""Settings: which source takes precedence, the origin of each value, and errors for invalid values."""

import re
from pathlib import Path

import pytest

from app.errors import InvalidSetting
from app.settings.settings import SETTINGS, Settings, chosen_editor, config_file, load_settings
from engine.config import ALL_FREE, MemoryLimit


@pytest.fixture(autouse=True)
def _empty_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unset all variables that the settings read, and use a temporary home folder."""
    for name, setting in SETTINGS.items():
        for variable in (f"INGLE_{name.upper()}", *setting.also):
            monkeypatch.delenv(variable, raising=False)
    for variable in ("HF_HOME", "HF_TOKEN_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, folder in (("XDG_CONFIG_HOME", "config"), ("XDG_DATA_HOME", "data"), ("XDG_CACHE_HOME", "cache")):
        monkeypatch.setenv(variable, str(tmp_path / folder))


def _write_config(text: str) -> Path:
    config_file().parent.mkdir(parents=True, exist_ok=True)
    config_file().write_text(text, encoding="utf-8")
    return config_file()


def test_unset_settings_have_their_defaults(tmp_path: Path) -> None:
    settings = load_settings()
    assert settings.model == "smollm2:135m"
    assert settings.hub_endpoint == "https://huggingface.co"
    assert (settings.threads, settings.context, settings.kernels, settings.offline) == (0, 0, "auto", False)
    assert settings.hub_token is None
    assert settings.hub_cache == tmp_path / "cache" / "huggingface" / "hub"
    assert (settings.kv_disk_gb, settings.kv_disk_limit) == (None, None)
    assert settings.kv_disk_dir == settings.cache_dir / "kv"
    assert set(settings.origins.values()) == {"default"}
    assert settings.origins.keys() == SETTINGS.keys()


@pytest.mark.parametrize(
    ("flag", "variable", "in_file", "value", "origin"),
    [
        (4, "3", "2", 4, "--threads"),
        (None, "3", "2", 3, "INGLE_THREADS"),
        (None, None, "2", 2, "config.toml"),
        (None, None, '"2"', 2, "config.toml"),
        (None, None, None, 0, "default"),
        (0, "3", "2", 0, "--threads"),
        (None, "", "2", 2, "config.toml"),
    ],
)
def test_option_precedes_variable_and_variable_precedes_file(
    monkeypatch: pytest.MonkeyPatch,
    flag: int | None,
    variable: str | None,
    in_file: str | None,
    value: int,
    origin: str,
) -> None:
    if variable is not None:
        monkeypatch.setenv("INGLE_THREADS", variable)
    if in_file is not None:
        _write_config(f"threads = {in_file}\n")
    settings = load_settings(threads=flag)
    assert settings.threads == value
    assert settings.origins["threads"].endswith(origin)


def test_ingle_variable_precedes_variables_of_other_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    assert load_settings().hub_endpoint == "https://mirror.example"
    assert load_settings().origins["hub_endpoint"] == "HF_ENDPOINT"
    monkeypatch.setenv("INGLE_HUB_ENDPOINT", "https://ours.example")
    assert load_settings().hub_endpoint == "https://ours.example"


def test_hugging_face_folders_follow_the_rules_of_huggingface_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", "~/hf")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_fromfile\n", encoding="utf-8")
    assert load_settings().hub_cache == tmp_path / "hf" / "hub"
    assert load_settings().hub_token == "hf_fromfile"  # noqa: S105
    monkeypatch.setenv("HF_TOKEN", "hf_fromvariable")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert load_settings().hub_token == "hf_fromvariable"  # noqa: S105
    assert load_settings().hub_cache == tmp_path / "elsewhere"


def test_token_is_not_in_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "hf_secret" not in repr(load_settings())


@pytest.mark.parametrize(
    ("variable", "in_file"),
    [
        ("gpt-4o=smollm2:135m, o3=*", ""),
        (None, 'model_aliases = "gpt-4o = smollm2:135m,o3 = *,"'),
        (None, '[model_aliases]\n"gpt-4o" = "smollm2:135m"\no3 = "*"'),
    ],
)
def test_model_aliases_are_a_string_or_a_table(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, in_file: str
) -> None:
    if variable is not None:
        monkeypatch.setenv("INGLE_MODEL_ALIASES", variable)
    _write_config(in_file)
    assert load_settings().model_aliases == {"gpt-4o": "smollm2:135m", "o3": "*"}


@pytest.mark.parametrize("table", ["{o3 = 1}", "3", '{"" = "a"}'])
def test_invalid_model_aliases_are_refused(table: str) -> None:
    _write_config(f"model_aliases = {table}\n")
    with pytest.raises(InvalidSetting, match="must be names with their models"):
        load_settings()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("INGLE_THREADS", "many"),
        ("INGLE_THREADS", "-1"),
        ("INGLE_THREADS", "2000000"),
        ("INGLE_KERNELS", "fast"),
        ("INGLE_CPU_TIER", "avx"),
        ("INGLE_OFFLINE", "perhaps"),
        ("HF_HUB_OFFLINE", "perhaps"),
        ("INGLE_HUB_ENDPOINT", "huggingface.co"),
        ("HF_ENDPOINT", "ftp://huggingface.co"),
        ("INGLE_MODEL", "  "),
        ("INGLE_KV_DISK_GB", "-1"),
        ("INGLE_KV_DISK_GB", "nan"),
        ("INGLE_KV_DISK_GB", "inf"),
        ("INGLE_KV_DISK_GB", "1000001"),
        ("INGLE_KV_DISK_GB", "much"),
        ("INGLE_KV_DISK_GB", "10GB"),
        ("INGLE_DEVICE", "gpu"),
        ("INGLE_DEVICE", "cuda:x"),
        ("INGLE_GPU_MEMORY", "20"),
        ("INGLE_GPU_MEMORY", "101%"),
        ("INGLE_GPU_MEMORY", "0GB"),
        ("INGLE_KV_HOST_MB", "all"),
        ("INGLE_MODEL_ALIASES", "gpt-4o"),
        ("INGLE_MODEL_ALIASES", "gpt-4o="),
        ("INGLE_MODEL_ALIASES", "=smollm2:135m"),
    ],
)
def test_error_names_the_origin_of_an_invalid_value(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidSetting, match=re.escape(variable)):
        load_settings()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("threads = true", "config.toml: threads must be a whole number"),
        ("models_dir = 3", "config.toml: models_dir must be a path"),
        ("offline = 2", "config.toml: offline must be yes or no"),
        ("kv_disk_gb = true", "config.toml: kv_disk_gb must be auto or a number"),
        ("kv_disk_gb = [1]", "config.toml: kv_disk_gb must be auto or a number"),
        ("thread = 2", "no such setting: thread"),
        ("threads = ", "config.toml"),
    ],
)
def test_error_names_an_invalid_config_file(text: str, complaint: str) -> None:
    _write_config(text)
    with pytest.raises(InvalidSetting, match=complaint):
        load_settings()


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        ("auto", ALL_FREE),
        ("20GB", MemoryLimit(num_bytes=20_000_000_000)),
        ("7.5 GB", MemoryLimit(num_bytes=7_500_000_000)),
        ("80%", MemoryLimit(share=0.8)),
        ("100%", MemoryLimit(share=1.0)),
    ],
)
def test_gpu_memory_accepts_a_size_or_a_percentage(value: str, limit: MemoryLimit) -> None:
    assert load_settings(gpu_memory=value, device="cuda:1").gpu_memory == limit


def test_kv_host_bytes_default_to_auto() -> None:
    assert load_settings().kv_host_bytes is None
    assert load_settings(kv_host_mb="2.5").kv_host_bytes == 2_500_000


def test_error_for_a_misspelled_key_suggests_a_similar_one() -> None:
    _write_config("modle = 'x'")
    with pytest.raises(InvalidSetting) as caught:
        load_settings()
    assert caught.value.remedy == "Did you mean model?"


@pytest.mark.parametrize(("word", "value"), [("1", True), ("YES", True), ("off", False), ("0", False)])
def test_booleans_accept_several_words(monkeypatch: pytest.MonkeyPatch, word: str, value: bool) -> None:
    monkeypatch.setenv("INGLE_OFFLINE", word)
    assert load_settings().offline is value


@pytest.mark.parametrize(
    ("given", "limit"),
    [("auto", None), ("0", 0), ("20", 20_000_000_000), ("0.25", 250_000_000), ("1e-12", 0), ("1000000", 10**15)],
)
def test_disk_limit_is_converted_to_bytes(given: str, limit: int | None) -> None:
    assert load_settings(kv_disk_gb=given).kv_disk_limit == limit


@pytest.mark.parametrize(("text", "limit"), [("'auto'", None), ("0", 0), ("0.5", 500_000_000), ("'2'", 2_000_000_000)])
def test_disk_limit_is_read_from_config_toml(text: str, limit: int | None) -> None:
    _write_config(f"kv_disk_gb = {text}")
    settings = load_settings()
    assert settings.kv_disk_limit == limit
    assert settings.origins["kv_disk_gb"] == str(config_file())


def test_auto_option_precedes_a_number_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_KV_DISK_GB", "3")
    assert load_settings(kv_disk_gb="auto").kv_disk_limit is None
    assert load_settings(kv_disk_gb="auto").origins["kv_disk_gb"] == "--kv-disk-gb"


def test_disk_cache_folder_defaults_to_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INGLE_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert load_settings().kv_disk_dir == tmp_path / "elsewhere" / "kv"
    monkeypatch.setenv("INGLE_KV_DISK_DIR", "~/kv")
    assert load_settings().kv_disk_dir == tmp_path / "kv"


def test_unknown_flag_raises_type_error() -> None:
    with pytest.raises(TypeError, match="thread"):
        load_settings(thread=2)


def test_every_setting_has_a_help_text() -> None:
    assert all(setting.meaning.endswith(".") for setting in SETTINGS.values())
    assert {*SETTINGS, "origins"} == set(Settings.__dataclass_fields__)


def test_setting_is_shown_in_the_form_that_the_user_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    file = _write_config("context = 1000\n")
    assert load_settings().stated("context") == f"context = 1000 in {file}"
    monkeypatch.setenv("INGLE_CONTEXT", "2000")
    assert load_settings().stated("context") == "INGLE_CONTEXT=2000"
    assert load_settings(context=3000).stated("context") == "--context 3000"


@pytest.mark.parametrize(("planes", "bits"), [("0", 0), ("1", 8), ("2", 14)])
def test_former_name_of_activation_bits_is_read(monkeypatch: pytest.MonkeyPatch, planes: str, bits: int) -> None:
    file = _write_config(f"activation_planes = {planes}\n")
    assert (load_settings().activation_bits, load_settings().origins["activation_bits"]) == (bits, str(file))
    file.unlink()
    monkeypatch.setenv("INGLE_ACTIVATION_PLANES", planes)
    assert load_settings().activation_bits == bits
    assert load_settings().origins["activation_bits"] == "INGLE_ACTIVATION_PLANES"


def test_error_shows_the_former_variable_and_the_current_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_ACTIVATION_PLANES", "14")
    with pytest.raises(InvalidSetting, match="INGLE_ACTIVATION_PLANES: activation_planes must be a whole number"):
        load_settings()


def test_activation_bits_are_0_8_or_14() -> None:
    assert load_settings(activation_bits="14").activation_bits == 14
    with pytest.raises(InvalidSetting, match="must be one of 0, 8, 14, not '16'"):
        load_settings(activation_bits="16")


@pytest.mark.parametrize(
    ("visual", "editor", "chosen"), [("code --wait", "vi", "code --wait"), ("", "vi", "vi"), ("", "", "")]
)
def test_visual_precedes_editor(monkeypatch: pytest.MonkeyPatch, visual: str, editor: str, chosen: str) -> None:
    monkeypatch.setenv("VISUAL", visual)
    monkeypatch.setenv("EDITOR", editor)
    assert chosen_editor() == chosen


def test_tables_of_models_replace_settings_of_all_models() -> None:
    _write_config('context = 1000\n[models."qwen3:8b"]\ncontext = 4096\npin = true\naliases = ["gpt-4o"]\n')
    settings = load_settings()
    assert settings.for_model("other").context == 1000
    assert settings.for_model("qwen3:8b").context == settings.for_model("x", "qwen3:8b").context == 4096
    assert (settings.of_model("qwen3:8b").pin, settings.of_model("other").pin) == (True, False)
    assert settings.of_model("qwen3:8b").aliases == ("gpt-4o",)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ('[models."a"]\nport = 1\n', "models of a have no key port"),
        ('[models."a"]\ncontext = "long"\n', "models of a: context must be a whole number"),
        ('models = "a"\n', "must be tables in config.toml"),
    ],
)
def test_wrong_tables_of_models_name_the_key(table: str, problem: str) -> None:
    _write_config(table)
    with pytest.raises(InvalidSetting, match=problem):
        load_settings()
