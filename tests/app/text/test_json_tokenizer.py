import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from app.errors import UnsupportedTokenizer
from app.text.json_tokenizer import from_json
from app.text.tokenizer import Tokenizer
from quant.errors import InglenookError, ModelFileError

SEPARATOR = "\n__ggml_vocab_test__\n"
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
SPM_STEPS = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
SPM_DECODER = decoders.Sequence(SPM_STEPS)


def saved(library: tokenizers.Tokenizer, **changes: object) -> bytes:
    """Return a tokenizer.json that the library wrote, with `changes` at its top level."""
    return json.dumps(json.loads(library.to_str()) | changes).encode()


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: id_ for id_, text in enumerate([*alphabet, "he", "ll"])}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l")]))
    library.pre_tokenizer = BYTE_LEVEL
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    library.add_tokens(["<tool>", "<|role|>"])
    return library


def sentencepiece() -> tokenizers.Tokenizer:
    texts = ["<unk>", *map("<0x{:02X}>".format, range(256)), *"\u2581ab<x>"]
    vocab = {text: id_ for id_, text in enumerate(texts)} | {"\u2581a": 300, "ab": 301}
    merges = [("\u2581", "a"), ("a", "b")]
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    library.decoder = SPM_DECODER
    library.add_special_tokens(["<unk>"])
    return library


PARTS = st.lists(st.sampled_from(["<s>", "</s>", "<tool>", "<x>", "<|role|>", " ", "\u2581", "\n", "a", "hell", "é"]))


def assert_agrees(library: tokenizers.Tokenizer, ours: Tokenizer, text: str) -> None:
    ids = library.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, parse_special=True) == ids
    assert ours.decode(ids) == library.decode(ids)


@given(PARTS.map("".join))
def test_byte_level_ids_equal_the_library(text: str) -> None:
    assert_agrees(*with_byte_level(), text)


@functools.cache
def with_byte_level() -> tuple[tokenizers.Tokenizer, Tokenizer]:
    return byte_level(), from_json(saved(byte_level()))


NORMALIZERS: dict[str, Any] = {
    "prepend": normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
    "replace": normalizers.Replace(" ", "\u2581"),
}


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@given(text=PARTS.map("".join))
def test_sentencepiece_ids_equal_the_library(normalizer: str, text: str) -> None:
    assert_agrees(*with_normalizer(normalizer), text)


@functools.cache
def with_normalizer(normalizer: str) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    library = sentencepiece()
    library.normalizer = NORMALIZERS[normalizer]
    if normalizer == "prepend":
        library.decoder = decoders.Sequence([*SPM_STEPS, decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["<s>", AddedToken("</s>", lstrip=True, rstrip=True)])
    library.add_tokens([AddedToken("<x>", normalized=False)])
    return library, from_json(saved(library))


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("in_sequence", [False, True])
@given(text=PARTS.map("".join))
def test_space_prefix_encodes_like_the_library(scheme: str, in_sequence: bool, text: str) -> None:
    library, ours = with_metaspace(scheme, in_sequence)
    assert ours.encode(text, parse_special=True) == library.encode(text, add_special_tokens=False).ids


@functools.cache
def with_metaspace(scheme: str, in_sequence: bool) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    """Return the library's tokenizer, and Inglenook's tokenizer for the same file."""
    library = sentencepiece()
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    library.pre_tokenizer = pre_tokenizers.Sequence([metaspace]) if in_sequence else metaspace
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    library.add_special_tokens(["<s>"])
    library.add_tokens([AddedToken("<x>", normalized=False)])
    return library, from_json(saved(library))


@pytest.mark.share(1)
@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "deepseek-llm", "falcon", "llama-spm", "gemma-4"])
def test_saved_tokenizer_gives_the_same_ids(
    llama_cpp_models: Path, vocabularies: Callable[[str], Tokenizer], name: str
) -> None:
    built = vocabularies(name)
    library = library_tokenizer(built)
    library.decoder = SPM_DECODER if name in ("llama-spm", "gemma-4") else decoders.ByteLevel()
    document = json.loads(library.to_str())
    document["added_tokens"] += [{"id": id_, "content": text, **SPECIAL} for text, id_ in built.control_tokens.items()]
    loaded = from_json(json.dumps(document).encode())
    texts = (llama_cpp_models / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split(SEPARATOR)
    markup = "".join(built.control_tokens)
    for text in [*texts, markup]:
        ids = built.encode(text)
        assert loaded.encode(text) == ids
        assert [loaded.token_bytes(id_) for id_ in ids] == [built.token_bytes(id_) for id_ in ids]
    assert loaded.encode(markup, parse_special=True) == built.encode(markup, parse_special=True)
    assert loaded.control_tokens == built.control_tokens


def library_tokenizer(built: Tokenizer) -> tokenizers.Tokenizer:
    return built._text_encoder._backend


def test_text_never_becomes_a_special_token() -> None:
    tokenizer = from_json(saved(byte_level()))
    text = "<s>hell</s><|role|><tool>"
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.control_tokens.values())
    assert tokenizer.decode(ids) == text
    assert tokenizer.control_tokens.keys() == {"<s>", "</s>", "<|role|>"}


def test_added_token_is_decoded_verbatim() -> None:
    library = byte_level()
    library.add_tokens(["é"])
    tokenizer = from_json(saved(library))
    [id_] = tokenizer.encode("é")
    assert tokenizer.token_bytes(id_) == "é".encode()


def test_only_special_tokens_are_hidden() -> None:
    tokenizer = from_json(saved(byte_level()))
    ids = tokenizer.encode("<s>he<tool><|role|></s>", parse_special=True)
    assert tokenizer.decode(ids) == "he<tool><|role|>"


def test_truncation_and_padding_are_ignored() -> None:
    library = byte_level()
    library.enable_truncation(2)
    library.enable_padding(length=50)
    assert len(from_json(saved(library)).encode("hello hello")) == 7


def test_configuration_sets_special_tokens_and_template() -> None:
    config = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
    }
    tokenizer = from_json(saved(byte_level()), config)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.end_of_generation_ids == {tokenizer.eos_id}
    assert tokenizer.add_bos
    assert tokenizer.chat_template == "D"
    assert from_json(saved(byte_level()), {"chat_template": "C"}).chat_template == "C"


def test_response_template_is_returned_unchanged() -> None:
    for stated, read in (({"fields": {}}, {"fields": {}}), (["?"], None), (None, None)):
        assert from_json(saved(byte_level()), {"response_template": stated}).response_template == read


def test_add_bos_comes_from_config_or_post_processor() -> None:
    library = byte_level()
    bos = {"bos_token": "<s>"}
    assert not from_json(saved(library), bos).add_bos
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>") or 0)]
    )
    assert from_json(saved(library), bos).add_bos
    assert not from_json(saved(library), {**bos, "add_bos_token": False}).add_bos
    assert not from_json(saved(library)).add_bos


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"type": "Unigram", "vocab": {"a": 0}}}, "'Unigram'"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "end_of_word_suffix": "</w>"}},
            "end_of_word_suffix",
        ),
        ({"decoder": {"type": "WordPiece"}}, "'WordPiece'"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "CTC"}]}}, "'CTC'"),
        ({"pre_tokenizer": {"type": "New"}}, "reading tokenizer.json"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}}, "reading tokenizer.json"),
    ],
)
def test_unknown_tokenizer_types_are_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedTokenizer) as refusal:
        from_json(saved(byte_level(), **changes))
    assert named in refusal.value.message
    assert refusal.value.remedy


def added(**changes: object) -> dict[str, object]:
    entry = {"id": 258, "content": "<s>", "special": True, "normalized": False}
    return {"added_tokens": [entry | changes]}


def bpe(**changes: object) -> dict[str, object]:
    return {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [], **changes}, "added_tokens": []}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model is missing"),
        ({"model": []}, "model is of type list"),
        ({"decoder": None}, "decoder is missing"),
        ({"added_tokens": [1]}, "added_tokens is not an array of dict"),
        (added(id="1"), "added_tokens[0].id is of type str"),
        (added(id=-1), "out of range"),
        (added(id=1 << 40), "out of range"),
        (added(id=3), "same id to two tokens"),
        (added(content=""), "added_tokens[0].content is empty"),
        (added(content="\ud800"), "not valid UTF-8"),
        (added(special="yes"), "added_tokens[0].special is of type str"),
        (added(single_word=True), "only as a whole word"),
        (bpe(vocab={}), "model.vocab does not map texts to ids"),
        (bpe(vocab={"a": "b"}), "model.vocab does not map texts to ids"),
        (bpe(vocab={"a": 0, "b": 0}), "same id to two tokens"),
        (bpe(merges=None), "model.merges is missing"),
        (bpe(merges=["a b"]), "model.merges: the merge of 'a' and 'b'"),
        (bpe(merges=["ab"]), "model.merges: the merge of 'ab' and ''"),
        (bpe(merges=[["a", "b"]]), "model.merges: the merge of 'a' and 'b'"),
        (bpe(merges=[["a"]]), "model.merges contains a merge that is not a pair of texts"),
        (bpe(merges=[1]), "model.merges is not an array of list"),
        (bpe(byte_fallback=True), "no token for the byte 0x00"),
    ],
)
def test_malformed_file_error_names_the_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InglenookError) as refusal:
        from_json(saved(byte_level(), **changes))
    assert message in refusal.value.message


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"{" + b"," * (1 << 22), b'{"a":1,"a":2}']
)
def test_non_object_json_is_refused(content: bytes) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: "):
        from_json(content)


@pytest.mark.parametrize(
    "config", [{"bos_token": "<none>"}, {"bos_token": 1}, {"eos_token": {}}, {"chat_template": [1]}]
)
def test_malformed_configurations_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(ModelFileError):
        from_json(saved(byte_level()), config)


@pytest.mark.parametrize("library", [byte_level, sentencepiece])
@pytest.mark.parametrize("has_text", [True, False])
def test_forged_post_processor_changes_no_text(library: Callable[[], tokenizers.Tokenizer], has_text: bool) -> None:
    marker, text = {"SpecialToken": {"id": "zz", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    forged = {
        "type": "TemplateProcessing",
        "single": [marker, text] if has_text else [marker],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"zz": {"id": "zz", "ids": [10**9] * 1000, "tokens": ["zz"] * 1000}},
    }
    plain, changed = from_json(saved(library())), from_json(saved(library(), post_processor=forged))
    assert changed.encode("hello a") == plain.encode("hello a")
    assert changed.encode_continuation("a") == plain.encode_continuation("a")
