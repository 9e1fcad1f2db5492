"""Recommended sampling comes from the catalog or from the model's files."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from app.models.catalog import Sampling
from app.models.sampling_defaults import DEFAULT_SAMPLING, catalogued_sampling, read_sampling, suitable_sampling
from quant.errors import ModelFileError
from tests.app.models.tiny_model import catalog
from tests.support.gguf_bytes import F32, build


@pytest.mark.parametrize(
    ("content", "sampling"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, Sampling(0.6, 0.9)),
        (
            {"temperature": 1, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05, "top_p": 0.8, "do_sample": True},
            Sampling(1.0, 0.8, 20, 0.05, 1.05),
        ),
        ({"top_p": 0.8}, Sampling(1.0, 0.8)),
        ({"temperature": 0.5, "top_k": -1, "top_p": 0.0, "min_p": None}, Sampling(0.5)),
        ({"eos_token_id": 3}, None),
        ({}, None),
    ],
)
def test_generation_config_recommends_sampling(tmp_path: Path, content: object, sampling: Sampling | None) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert read_sampling(tmp_path, {}) == sampling


def test_folder_without_generation_config_recommends_none(tmp_path: Path) -> None:
    assert read_sampling(tmp_path, {}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 3),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_p", -0.1),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", [1]),
        ("temperature", 10**400),
    ],
)
def test_error_names_an_invalid_value(tmp_path: Path, name: str, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ModelFileError, match=f"generation_config.json: {name} is"):
        read_sampling(tmp_path, {})


GGUF = {
    "general.sampling.temp": 0.6,
    "general.sampling.top_k": 20,
    "general.sampling.top_p": 0.949999988079071,  # 0.95 as float32
    "general.sampling.penalty_repeat": 1.0499999523162842,
    "general.sampling.mirostat": 0,
}


@pytest.mark.parametrize(
    ("metadata", "sampling"),
    [
        (GGUF, Sampling(0.6, 0.95, 20, 0.0, 1.05)),
        ({"general.sampling.top_k": -1}, Sampling(1.0)),
        ({"general.name": "temp"}, None),
    ],
)
def test_gguf_metadata_recommends_sampling(
    tmp_path: Path, metadata: Mapping[str, object], sampling: Sampling | None
) -> None:
    assert read_sampling(tmp_path / "file.gguf", metadata) == sampling


@pytest.mark.parametrize(("key", "value"), [("temp", float("nan")), ("top_p", "0.5"), ("penalty_repeat", 0.0)])
def test_error_names_a_gguf_value_out_of_bounds(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=f"general.sampling.{key} is"):
        read_sampling(tmp_path / "file.gguf", {f"general.sampling.{key}": value})


def test_catalog_overrides_files_and_the_default(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert catalogued_sampling("tiny", tmp_path, catalog()) == Sampling(temperature=0.2, top_p=0.9)
    assert catalogued_sampling("other", tmp_path, catalog()) is None
    assert suitable_sampling("other", tmp_path) == Sampling(0.6)
    assert suitable_sampling("smollm2:135m", tmp_path) == Sampling(0.0, repetition_penalty=1.1)
    assert suitable_sampling("gone", tmp_path / "gone.gguf") == DEFAULT_SAMPLING


def test_metadata_of_a_gguf_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(build([("general.sampling.temp", F32, 0.5)], []).data)
    assert suitable_sampling("m", tmp_path / "m.gguf") == Sampling(0.5)


def test_sampling_text_names_changed_values_only() -> None:
    assert str(Sampling(0.0, repetition_penalty=1.1)) == "temperature 0, repetition_penalty 1.1"
    assert str(Sampling(1.0)) == "temperature 1"


def test_a_path_has_the_sampling_of_its_file_in_the_catalog(tmp_path: Path) -> None:
    [entry] = catalog()
    file = tmp_path / entry.file
    file.write_bytes(bytes(entry.size))
    assert catalogued_sampling(str(file), file, catalog()) == entry.sampling
    file.write_bytes(bytes(entry.size + 1))
    assert catalogued_sampling(str(file), file, catalog()) is None
