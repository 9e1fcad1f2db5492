"""The sampling that suits a model: the catalog's, or that of its own files."""

import json
from pathlib import Path

import pytest

from app.models.catalog import Sampling
from app.models.sampling_defaults import read_sampling, sampling_of
from quant.errors import ModelFileError
from tests.app.models.tiny_model import catalog


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
def test_what_a_folder_says(tmp_path: Path, content: object, sampling: Sampling | None) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert read_sampling(tmp_path) == sampling


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert read_sampling(tmp_path) is None


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
def test_values_that_make_no_sense_are_named(tmp_path: Path, name: str, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ModelFileError, match=f"generation_config.json: {name} is"):
        read_sampling(tmp_path)


def test_the_catalog_comes_first_and_a_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    file = tmp_path / "file.gguf"
    file.touch()
    assert sampling_of("tiny", tmp_path, catalog()) == Sampling(temperature=0.2, top_p=0.9)
    assert sampling_of("other", tmp_path, catalog()) == Sampling(0.6)
    assert sampling_of("other", file, catalog()) is None
