import functools
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UnsupportedTokenizer
from app.text.encoder_tokenizer import EncoderTokenizer, from_gguf, from_json
from quant.errors import InglenookError, ModelFileError
from tests.app.text.small_wordpiece import PIECES, TOKENS, document, ids, metadata
from tests.app.text.test_gguf_tokenizer import truth, vocabulary_metadata

SOURCES = {"gguf": lambda: from_gguf(metadata()), "json": lambda: from_json(document())}


@pytest.fixture(params=SOURCES)
def small(request: pytest.FixtureRequest) -> EncoderTokenizer:
    return SOURCES[request.param]()


def test_ids_match_the_original_tokenizer(llama_cpp_models: Path) -> None:
    tokenizer = from_gguf(vocabulary_metadata(llama_cpp_models, "bert-bge"))
    for text, expected in truth(llama_cpp_models, "bert-bge"):
        assert tokenizer.encode(text) == (101, *expected, 102), text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", ()),
        ("Hello worlds!", ("hello", "wor", "##ld", "##s", "!")),
        ("CAFÉ", ("cafe",)),
        ("的a我ab", ("的", "a", "我", "a", "##b")),
        ("ab\u0000\ufffd\tab", ("a", "##b", "a", "##b")),
        ("hello unheard", ("hello", "[UNK]")),
        ("a" * 101, ("[UNK]",)),
        ("a \ud800 a", ("a", "a")),
    ],
)
def test_text_is_normalized_like_bert(small: EncoderTokenizer, text: str, pieces: tuple[str, ...]) -> None:
    assert small.encode(text) == ids(*pieces)


def test_text_never_becomes_a_marker(small: EncoderTokenizer) -> None:
    assert small.encode("[SEP]") == ids("[", "[UNK]", "]")


def test_text_is_cut_between_its_markers(small: EncoderTokenizer) -> None:
    assert small.encode("hello hello hello", max_ids=4) == ids("hello", "hello")
    assert small.encode("hello", max_ids=1) == ids()


def test_ids_are_below_vocab_size(small: EncoderTokenizer) -> None:
    assert small.vocab_size == len(TOKENS)


@given(st.text())
def test_ids_equal_the_library_for_either_file(text: str) -> None:
    library, of_json, of_gguf = tokenizers_of_both_files()
    plain = text.replace("[", "").replace("\ud800", "")
    assert list(of_json.encode(plain)) == library.encode(plain).ids
    assert of_gguf.encode(plain) == of_json.encode(plain)


@functools.cache
def tokenizers_of_both_files() -> tuple[tokenizers.Tokenizer, EncoderTokenizer, EncoderTokenizer]:
    library = tokenizers.Tokenizer.from_str(document().decode())
    library.no_truncation()
    return library, from_json(document()), from_gguf(metadata())


def test_case_and_accents_are_kept_if_configured() -> None:
    tokenizer = from_gguf(metadata(**{"normalizer.lowercase": False}))
    assert tokenizer.encode("Hello café cafe") == ids("[UNK]", "[UNK]", "cafe")
    stripping = from_gguf(metadata(**{"normalizer.lowercase": False, "normalizer.strip_accents": True}))
    assert stripping.encode("café") == ids("cafe")


def test_alternative_marker_keys_are_supported() -> None:
    renamed = metadata(cls_token_id=None, bos_token_id=2, seperator_token_id=None, eos_token_id=3)
    assert from_gguf(renamed).encode("a") == ids("a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ("a", 1)}, "tokenizer.ggml.tokens is not an array of str"),
        ({"token_type": None}, "tokenizer.ggml.token_type is missing"),
        ({"token_type": (1,)}, f"tokenizer.ggml.token_type has 1 elements for {len(TOKENS)} tokens"),
        ({"cls_token_id": len(TOKENS)}, "tokenizer.ggml.cls_token_id is"),
        ({"cls_token_id": None}, "tokenizer.ggml.cls_token_id is 101"),
        ({"unknown_token_id": -1}, "tokenizer.ggml.unknown_token_id is -1"),
    ],
)
def test_malformed_metadata_error_names_the_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError) as refusal:
        from_gguf(metadata(**changes))
    assert message in refusal.value.message
    assert refusal.value.remedy


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "it is not an object"),
        (b'{"model": 3}', "model is of type int"),
        (document(vocab=None), "model.vocab is missing"),
        (document().replace(b'"[PAD]", "special"', b'[], "special"'), "added_tokens[0].content is of type list"),
        (document(unk_token="[NONE]"), "model.unk_token is '[NONE]', which is not a token"),  # noqa: S106
    ],
)
def test_malformed_tokenizer_json_error_names_the_field(content: bytes, message: str) -> None:
    with pytest.raises(ModelFileError) as refusal:
        from_json(content)
    assert message in refusal.value.message


def with_added(**token: object) -> bytes:
    """Return a tokenizer.json with one additional added token."""
    changed = json.loads(document())
    changed["added_tokens"].append({**changed["added_tokens"][0], **token})
    return json.dumps(changed).encode()


def test_added_token_keeps_its_id() -> None:
    tokenizer = from_json(with_added(id=40, content="<tool>", special=False))
    assert tokenizer.encode("a <tool> b") == (*ids("a")[:-1], 40, *ids("[UNK]")[1:])
    assert tokenizer.vocab_size == 41
    assert from_json(with_added(id=40, content="<tool>", special=True)).encode("<tool>") == ids(*["[UNK]"] * 3)


def test_post_processor_of_bpe_file_is_used() -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    library.add_special_tokens(["<end>"])
    library.post_processor = tokenizers.processors.TemplateProcessing("$A <end>", special_tokens=[("<end>", 3)])
    tokenizer = from_json(library.to_str().encode())
    assert tokenizer.encode("aba") == (2, 0, 3)
    assert tokenizer.encode("aba", max_ids=2) == (2, 3)
    assert (tokenizer.encode(""), tokenizer.vocab_size) == ((3,), 4)


def test_unsupported_model_is_refused() -> None:
    with pytest.raises(UnsupportedTokenizer, match="'gpt2'"):
        from_gguf(metadata(model="gpt2"))
    with pytest.raises(UnsupportedTokenizer, match="'Unigram'"):
        from_json(document(type="Unigram"))


VALUES = st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats() | st.text(max_size=4)
FIELDS = ("version", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "model")


@given(st.sampled_from(FIELDS), VALUES | st.lists(VALUES, max_size=3) | st.dictionaries(st.text(max_size=4), VALUES))
def test_any_tokenizer_json_raises_only_known_errors(field: str, value: object) -> None:
    changed = {**json.loads(document()), field: value}
    try:
        tokenizer = from_json(json.dumps(changed).encode())
    except InglenookError:
        return
    tokenizer.encode("Hello worlds")


@given(st.sampled_from(["tokens", "token_type", "cls_token_id", "normalizer.lowercase"]), VALUES, st.data())
def test_any_metadata_raises_only_known_errors(field: str, value: object, data: st.DataObject) -> None:
    fields = metadata()
    if field.startswith("token"):
        array = list(fields[f"tokenizer.ggml.{field}"])  # type: ignore[call-overload]
        array[data.draw(st.integers(0, len(PIECES)))] = value
        value = tuple(array)
    try:
        tokenizer = from_gguf({**fields, f"tokenizer.ggml.{field}": value})
    except InglenookError:
        return
    tokenizer.encode("Hello worlds")
