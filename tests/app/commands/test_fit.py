"""`ingle fit`: its output as a table and as JSON."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.cli import ingle
from app.models.decode_rate import DecodeRate, remember_rate
from tests.engine.models import family_checkpoints as families
from tests.engine.models.tiny_llama import make


def fit(*words: object) -> Result:
    return CliRunner().invoke(ingle, ["fit", *map(str, words)])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny"), head_dim=32).path


@pytest.mark.parametrize("name", ["qwen3 moe", "llama"])
def test_weights_that_a_token_reads_are_shown(tmp_path: Path, name: str) -> None:
    has_experts = name != "llama"
    path = families.make(tmp_path, name, "folder").path
    found = json.loads(fit(path, "--device", "cpu", "--json").stdout)
    assert (found["active_parameters"] < found["parameters"]) is has_experts
    assert (found["active_weights"] < found["weights"]) is has_experts
    share = found["active_parameters"] / found["parameters"]
    assert found["active_weights"] == pytest.approx(found["weights"] * share, abs=1)
    assert ("each token reads" in fit(path, "--device", "cpu").stdout) is has_experts


def test_formula_gives_kv_and_weight_sizes() -> None:
    """The formula is applied to 70 billion weights and 80 layers of 64 heads.

    Heads have 128 dimensions and are not grouped, so the KV cache takes 2.6 MB per token.
    """
    figures = ("--layers", 80, "--kv-heads", 64, "--head-dim", 128, "--context", 4096)
    found = json.loads(fit("--params", "70b", *figures, "--json").stdout)
    assert found["kv"][0] == {"bits": 16, "token_bytes": 2_621_440, "size": 10_737_418_240}
    assert found["kv"][1] == {"bits": 8, "token_bytes": 1_310_720, "size": 5_368_709_120}
    weights = {it["bits"]: it["size"] for it in found["weights"]}
    assert weights == {16: 140 * 10**9, 8: 70 * 10**9, 4: 35 * 10**9}
    assert fit("--params", "70b", *figures).stdout.splitlines() == [
        "KV in 16 bits: 2,621,440 bytes per token, 10.7 GB for 4,096 tokens",
        "KV in 8 bits: 1,310,720 bytes per token, 5.4 GB for 4,096 tokens",
        "weights in 16 bits: 140.0 GB",
        "weights in 8 bits: 70.0 GB",
        "weights in 4 bits: 35.0 GB",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("--layers", 80),
        ("--params", "many", "--layers", 1, "--kv-heads", 1, "--head-dim", 1),
        ("--layers", 0, "--kv-heads", 1, "--head-dim", 1),
        ("name", "--layers", 1, "--kv-heads", 1, "--head-dim", 1),
        ("--memory", "80%"),
        ("--memory", "much"),
    ],
)
def test_invalid_figures_are_a_usage_error(words: tuple[object, ...]) -> None:
    assert fit(*words).exit_code == 2


def test_limit_of_the_kv_cache_on_a_gpu_is_shown(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (tiny, "--device", "cuda", "--memory", "8GB")
    (line,) = (line for line in fit(*words).stdout.splitlines() if line.startswith("KV CACHE"))
    assert "at most 3." in line
    assert "INGLE_GPU_MEMORY" in line
    assert json.loads(fit(*words, "--json").stdout)["kv_limit"] > 3 * 10**9
    monkeypatch.setenv("INGLE_GPU_MEMORY", "90%")
    assert "KV CACHE" not in fit(*words).stdout


def test_model_at_a_path_fits(tiny: Path) -> None:
    shown = fit(tiny, "--memory", "1GB")
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert lines[0].startswith(f"{tiny} fits: 512 context; needs ")
    assert lines[0].endswith(", 1.0 GB free")
    assert [line.split()[0] for line in lines[2:6]] == ["FILES", "DEVICE", "WEIGHTS", "STEPS"]
    assert [line.split()[:2] for line in lines[-2:]] == [["f16", "512"], ["int8", "512"]]


def test_speed_is_shown_after_the_device_was_measured(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGLE_STATE_DIR", str(tmp_path))
    words = (tiny, "--memory", "1GB", "--device", "cpu")
    assert json.loads(fit(*words, "--json").stdout)["tokens_per_second"] is None
    remember_rate(tmp_path, DecodeRate("cuda", 1e9))
    assert "SPEED" not in fit(*words).stdout
    remember_rate(tmp_path, DecodeRate("cpu", 1e9))
    found = json.loads(fit(*words, "--json").stdout)
    assert found["tokens_per_second"] == pytest.approx(1e9 / found["weights"])
    assert "SPEED" in fit(*words).stdout


def test_model_that_does_not_fit_exits_with_1(tiny: Path) -> None:
    shown = fit(tiny, "--memory", "0.01GB", "--json")
    assert shown.exit_code == 1
    found = json.loads(shown.stdout)
    assert (found["fits"], found["memory"], found["is_stored"]) == (False, 10_000_000, True)
    assert found["needed"] > found["memory"]
    assert {cache["type"]: cache["context"] for cache in found["kv"]} == {"f16": 0, "int8": 0}
    assert found["kv"][0]["groups"] == [{"window": None, "token_bytes": found["kv"][0]["token_bytes"]}]
