"""The tokenizer of a folder equals that of transformers for the same files."""

import json
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UnsupportedTokenizer
from app.text.folder_tokenizer import MAX_ENDING_IDS, from_folder
from quant.errors import ModelFileError
from tests.app.text.tiny_tokenizer import BOS, EOS, TURN, byte_level

PARTS = st.lists(st.sampled_from([BOS, EOS, TURN, "<tool>", " ", "\n", "the", "fox", "é", "中", "😀", "def f():"]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with only a vocabulary."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that transformers saved."""
    folder = tmp_path_factory.mktemp("saved")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token=BOS, eos_token=EOS)  # type: ignore[no-untyped-call]
    theirs.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    theirs.save_pretrained(folder)
    return folder


@given(text=PARTS.map("".join))
def test_ids_and_texts_equal_transformers(saved: Path, text: str) -> None:
    ours, theirs = from_folder(saved), transformers.PreTrainedTokenizerFast.from_pretrained(saved)
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, parse_special=True) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_special_tokens_and_template_equal_transformers(saved: Path) -> None:
    ours, theirs = from_folder(saved), transformers.PreTrainedTokenizerFast.from_pretrained(saved)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))
    assert ours.chat_template == theirs.chat_template


def test_folder_with_only_a_vocabulary_is_loaded(folder: Path) -> None:
    tokenizer = from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.chat_template) == (None, None, None)
    assert tokenizer.decode(tokenizer.encode("the fox 😀")) == "the fox 😀"


def test_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTokenizer, match=r"no tokenizer\.json") as caught:
        from_folder(tmp_path)
    assert "GGUF" in caught.value.remedy


PLACES = ["chat_template.json", "tokenizer_config.json", "chat_template.jinja"]  # later files override earlier ones


@pytest.mark.parametrize("number", range(3))
def test_newer_template_file_overrides_older_ones(folder: Path, number: int) -> None:
    for name in PLACES[: number + 1]:
        if name.endswith(".json"):
            write(folder, name, {"chat_template": name})
        else:
            (folder / name).write_text(name)
    assert from_folder(folder).chat_template == PLACES[number]


def test_template_named_default_is_used(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert from_folder(folder).chat_template == "D"


def test_special_tokens_map_is_a_fallback(folder: Path) -> None:
    write(folder, "special_tokens_map.json", {"bos_token": {"content": BOS}, "eos_token": TURN})
    write(folder, "tokenizer_config.json", {"eos_token": EOS})
    assert from_folder(folder).special_tokens == {"bos_token": BOS, "eos_token": EOS}
    write(folder, "tokenizer_config.json", {"eos_token": EOS, "bos_token": None})
    assert from_folder(folder).special_tokens == {"eos_token": EOS}


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [2, 7]}, {"eos_token_id": 9}, {1, 2, 7}),
        ({"eos_token_id": 2}, {}, {1, 2}),
        ({}, {"eos_token_id": 9}, {1, 9}),
        ({"eos_token_id": None}, {"eos_token_id": None}, {1}),
    ],
)
def test_ending_ids_come_from_generation_config_or_config(
    folder: Path, generation: object, config: object, ids: set[int]
) -> None:
    write(folder, "tokenizer_config.json", {"eos_token": EOS})
    write(folder, "generation_config.json", generation)
    write(folder, "config.json", config)
    assert from_folder(folder).end_of_generation_ids == ids


@pytest.mark.parametrize("ids", ["2", 2.0, True, -1, [2, "3"], [2, -3], list(range(MAX_ENDING_IDS + 1))])
def test_invalid_ending_ids_are_refused(folder: Path, ids: object) -> None:
    write(folder, "generation_config.json", {"eos_token_id": ids})
    with pytest.raises(ModelFileError, match=r"generation_config\.json: eos_token_id"):
        from_folder(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "config.json", "chat_template.json"]
)
def test_non_object_file_error_names_the_file(folder: Path, name: str) -> None:
    (folder / name).write_text("[]")
    with pytest.raises(ModelFileError, match=name):
        from_folder(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_files_outside_the_folder_are_not_read(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    (folder / name).unlink(missing_ok=True)
    outside = tmp_path_factory.mktemp("outside") / "file"
    outside.write_text("{}")
    (folder / name).symlink_to(outside)
    with pytest.raises(ModelFileError, match="points outside of"):
        from_folder(folder)
