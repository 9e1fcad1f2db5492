"""Short names of Hub models: the shipped data, how names are resolved, and errors for invalid data."""

from collections import Counter
from pathlib import Path

import pytest

from app.models.catalog import load_catalog
from app.models.families import FAMILIES_FILE, KINDS, active_bytes, load_families
from app.models.repository import RepositoryName
from app.models.store import ModelStore
from tests.app.models.tiny_model import settings_in


def test_families_file_has_models_of_all_kinds() -> None:
    families = load_families()
    counts = Counter(model.kind for model in families)
    assert counts.keys() == {*KINDS}
    assert counts.total() >= 50
    assert len({model.repository for model in families}) == counts.total()
    names = {name for entry in load_catalog() for name in (entry.name, *entry.aliases)}
    assert names.isdisjoint({*families.models, *families.defaults})
    sizes = [model.usual_size for model in families.recommended]
    assert sizes == sorted(sizes, reverse=True)
    assert {model.license for model in families.recommended} == {"Apache-2.0"}
    assert {model.kind for model in families.recommended} <= {"chat", "reasoning"}
    for model in families:
        allowed = (model.kind, "chat", "reasoning")
        assert families.repository(model.name) == model.repository
        assert model.draft is None or model.draft in names or families.models[model.draft].kind in allowed


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("qwen2.5:0.5b", 398),
        ("qwen3:0.6b", 484),
        ("llama3.2:1b", 808),
        ("llama3.2:3b", 2019),
        ("qwen3:8b", 5028),
        ("gpt-oss:20b", 12_110),
        ("gpt-oss:120b", 63_390),
        ("gemma4:e2b", 3_412),
        ("gemma4:26b", 16_800),
    ],
)
def test_usual_size_is_near_that_of_the_published_file(name: str, megabytes: int) -> None:
    assert load_families().models[name].usual_size == pytest.approx(megabytes * 10**6, rel=0.1)


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("qwen3", RepositoryName("bartowski/Qwen_Qwen3-4B-GGUF")),
        ("Qwen3:0.6B", RepositoryName("bartowski/Qwen_Qwen3-0.6B-GGUF")),
        ("qwen3:4b-q8_0", RepositoryName("bartowski/Qwen_Qwen3-4B-GGUF", "Q8_0")),
        ("gemma3:1b-q4_k_m", RepositoryName("bartowski/google_gemma-3-1b-it-GGUF", "Q4_K_M")),
        ("gemma4", RepositoryName("bartowski/google_gemma-4-E4B-it-GGUF")),
        ("gemma4:E2B-q8_0", RepositoryName("bartowski/google_gemma-4-E2B-it-GGUF", "Q8_0")),
        *((name, None) for name in ("smollm2", "qwen3:5b", "qwen3:", "qwen3:4b-", "qwen3:4b-x", "qwen", "", "../x")),
    ],
)
def test_names_are_resolved_to_repositories(name: str, repository: RepositoryName | None) -> None:
    assert load_families().repository(name) == repository


def test_store_prefers_the_catalog_to_families(tmp_path: Path) -> None:
    store = ModelStore(settings_in(tmp_path))
    assert store.repository("qwen3:8b") == RepositoryName("bartowski/Qwen_Qwen3-8B-GGUF")
    assert store.repository("smollm2:135m") is None
    assert load_families().similar("quen3:8b")[0] == "qwen3:8b"


@pytest.mark.parametrize(
    ("original", "broken"),
    [
        ('kind = "chat"', 'kind = "chatter"'),
        ("context = 8192", "context = 0"),
        ('license = "', 'licence = "'),
        ('360m = "bartowski/', '360m = "../'),
        ("360m =", "big ="),
        ('name = "smollm2"', 'name = "../x"'),
        ('name = "llama3.1"', 'name = "llama3.2"'),
        ('default = "3b"', 'default = "4b"'),
        ('recommended = ["qwen3.6:35b"', 'recommended = ["qwen3.6:36b"'),
    ],
)
def test_invalid_families_file_is_refused(tmp_path: Path, original: str, broken: str) -> None:
    text = FAMILIES_FILE.read_text(encoding="utf-8")
    assert original in text
    file = tmp_path / "families.toml"
    file.write_text(text.replace(original, broken, 1), encoding="utf-8")
    with pytest.raises(ValueError, match="families"):
        load_families(file)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("bartowski/Qwen_Qwen3-30B-A3B-GGUF", 3_000),
        ("LiquidAI/LFM2.5-8B-A1B-GGUF:Q4_K_M", 3_750),
        ("org/mixture-1.5b-a0.5b", 10_000),
        ("org/empty-0B-A0B", 30_000),
        ("bartowski/Qwen_Qwen3-32B-GGUF", 30_000),
        ("org/some-7B-A3Bx", 30_000),
        ("org/smoke-7B", 30_000),
        ("zai-org/GLM-4-9B", 30_000),
        ("ibm-granite/granite-3.1-3b-a800m-instruct", 8_000),
        ("baidu/ERNIE-4.5-21B-A3B-PT", 4_286),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", None),
        ("allenai/OLMoE-1B-7B-0924-Instruct-GGUF", None),
        ("TheBloke/Mixtral-v0.1-GGUF", None),
        ("org/Beyonder-4x7B-v2", None),
        ("unsloth/GLM-4.5-Air-GGUF", None),
        ("unsloth/MiniMax-M2-GGUF", None),
        ("ggml-org/gpt-oss-20b-GGUF", None),
    ],
)
def test_active_bytes_follow_from_the_name_of_a_mixture_of_experts(name: str, active: int | None) -> None:
    assert active_bytes(name, 30_000) == active
