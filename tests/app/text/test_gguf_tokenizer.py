import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import UnsupportedTokenizer
from app.text import long_texts
from app.text.gguf_tokenizer import from_gguf
from app.text.pretokenizers import PRETOKENIZERS
from app.text.tokenizer import Tokenizer
from quant.errors import InglenookError, ModelFileError
from quant.gguf import GGUFFile
from quant.string_array import StringArray
from tests.app.text.small_vocabulary import BYTES, CONTROL, metadata

SEPARATOR = "\n__ggml_vocab_test__\n"

# All vocabularies for which llama.cpp has test ids, except BERT's, with the tokens that end a reply.
VOCABULARIES = {
    "command-r": {"<PAD>", "<|END_OF_TURN_TOKEN|>"},
    "deepseek-coder": {"<｜end▁of▁sentence｜>"},
    "deepseek-llm": {"<｜end▁of▁sentence｜>"},
    "falcon": {"<|endoftext|>"},
    "gemma-4": {"<eos>", "<turn|>", "<|tool_response>"},
    "gpt-2": {"<|endoftext|>"},
    "llama-bpe": {"<|end_of_text|>", "<|eot_id|>"},
    "llama-spm": {"</s>"},
    "mpt": {"<|endoftext|>"},
    "phi-3": {"<|endoftext|>", "<|end|>"},
    "qwen2": {"<|endoftext|>", "<|im_end|>"},
    "qwen35": {"<|endoftext|>", "<|im_end|>"},
    "refact": {"<|endoftext|>", "<fim_pad>", "<reponame>"},
    "starcoder": {"<|endoftext|>", "<fim_pad>"},
}
EXPECT_BOS = {"command-r", "deepseek-coder", "deepseek-llm", "gemma-4", "llama-bpe", "llama-spm", "phi-3"}
PREFIX_SPACE = {"llama-spm", "phi-3"}

half_of_them = pytest.mark.share(7)  # every test gets the same half, because a large vocabulary takes seconds to build


def vocabulary_metadata(models: Path, name: str) -> dict[str, object]:
    with GGUFFile(models / f"ggml-vocab-{name}.gguf") as file:
        return dict(file.metadata)


def truth(models: Path, name: str) -> list[tuple[str, list[int]]]:
    """Return llama.cpp's test cases: texts, and their ids from the models' original tokenizers."""
    texts = (models / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split(SEPARATOR)
    lines = (models / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    cases = [(text, [int(id_) for id_ in line.split()]) for text, line in zip(texts, lines, strict=False)]
    assert len(cases) == len(lines) >= 46
    return cases


@pytest.fixture(scope="module", params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest, vocabularies: Callable[[str], Tokenizer]) -> tuple[str, Tokenizer]:
    name: str = request.param
    return name, vocabularies(name)


# Pieces of text that tests join with and without spaces.
WORDS = (
    *("the", "cat", "a", "1", "23", "456,", "7.5", '"x": ', "don't", "I'm", "foo_bar", "(x)", "x.y,", "0x1f", "-", "!"),
    *(" ", "  ", "\n", "\n\n", "\t", "\u00a0", "é", "中文", "🙂", "<|im_end|>"),
)


@half_of_them
def test_long_text_has_the_same_ids_in_pieces(
    vocabulary: tuple[str, Tokenizer], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tokenizer = vocabulary
    assert tokenizer.splits_at_words
    monkeypatch.setattr(long_texts, "PIECE", 40)
    chance = random.Random(seed)
    for at_start in (True, False):
        words = (chance.choice(WORDS) + chance.choice(("", " ", " ")) for _ in range(4000))
        text = "".join(words)
        whole = tokenizer.encode_piece(text, at_start=at_start)
        assert tokenizer.encode_plain(text, at_start=at_start) == whole


@half_of_them
def test_ids_match_the_original_tokenizer(llama_cpp_models: Path, vocabulary: tuple[str, Tokenizer]) -> None:
    name, tokenizer = vocabulary
    for text, ids in truth(llama_cpp_models, name):
        assert tokenizer.encode(text) == ids, text


@half_of_them
def test_token_bytes_form_the_text(llama_cpp_models: Path, vocabulary: tuple[str, Tokenizer]) -> None:
    name, tokenizer = vocabulary
    for text, ids in truth(llama_cpp_models, name):
        prefix = " " if text and name in PREFIX_SPACE else ""
        assert b"".join(map(tokenizer.token_bytes, ids)) == (prefix + text).encode()
        assert tokenizer.decode(ids) == text


@half_of_them
def test_special_tokens_come_from_metadata(vocabulary: tuple[str, Tokenizer]) -> None:
    name, tokenizer = vocabulary
    ending = {tokenizer.token_bytes(id_, show_control=True).decode() for id_ in tokenizer.end_of_generation_ids}
    assert ending == VOCABULARIES[name]
    assert tokenizer.add_bos is (name in EXPECT_BOS)
    assert tokenizer.space_prefix is (name in PREFIX_SPACE)
    assert tokenizer.bos_id in tokenizer.encode(tokenizer.special_tokens["bos_token"], parse_special=True)
    assert tokenizer.eos_id in tokenizer.end_of_generation_ids


@half_of_them
def test_plain_text_never_becomes_a_control_token(vocabulary: tuple[str, Tokenizer]) -> None:
    _, tokenizer = vocabulary
    markup = "".join(tokenizer.control_tokens)
    assert not set(tokenizer.encode(markup)) & set(tokenizer.control_tokens.values())
    assert tokenizer.decode(tokenizer.encode(markup)) == markup


@pytest.mark.parametrize("name", ["qwen2", "phi-3"])
def test_chat_template_comes_from_metadata(
    llama_cpp_models: Path, vocabularies: Callable[[str], Tokenizer], name: str
) -> None:
    fields = vocabulary_metadata(llama_cpp_models, name)
    assert vocabularies(name).chat_template == fields["tokenizer.chat_template"]


def test_space_is_added_after_each_control_token(vocabularies: Callable[[str], Tokenizer]) -> None:
    tokenizer = vocabularies("llama-spm")
    hello = tokenizer.encode("Hello")
    assert tokenizer.encode("<s>Hello</s>Hello", parse_special=True) == [1, *hello, 2, *hello]


def test_phi_3_markup_includes_following_white_space(
    llama_cpp_models: Path, vocabularies: Callable[[str], Tokenizer]
) -> None:
    tokenizer, fields = vocabularies("phi-3"), vocabulary_metadata(llama_cpp_models, "phi-3")
    user, end = tokenizer.control_tokens["<|user|>"], tokenizer.control_tokens["<|end|>"]
    assert tokenizer.encode("<|user|>\nHi<|end|>\n", parse_special=True) == [user, *tokenizer.encode("Hi"), end]
    others = from_gguf({**fields, "general.name": "Other"})
    assert others.encode("<|end|>\n", parse_special=True) == [end, *others.encode("\n")]


def test_gemma_ascii_tokens_replace_byte_tokens(llama_cpp_models: Path) -> None:
    fields = vocabulary_metadata(llama_cpp_models, "llama-spm")
    tokens = fields["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray)
    renamed = tuple("\t" if text == "<0x09>" else text for text in tokens)
    tokenizer = from_gguf({**fields, "tokenizer.ggml.tokens": renamed})
    assert tokenizer.decode(tokenizer.encode("a\tb")) == "a\tb"


@pytest.mark.parametrize("name", PRETOKENIZERS)
def test_every_pre_tokenizer_keeps_every_character(name: str) -> None:
    tokenizer = from_gguf(metadata(pre=name))
    text = "Hello  world! I'm 12345 years\r\n\told, 'TIS ½ é 我在用 かな 한국어 नमस्ते 🦙\u200d…//\n\n  x"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_are_applied_in_the_listed_order() -> None:
    tokenizer = from_gguf(metadata())
    assert tokenizer.encode("hello w") == [len(BYTES) + 3, len(BYTES) + 4]


def test_user_defined_tokens_are_found_in_text() -> None:
    tokenizer = from_gguf(metadata())
    [id_] = tokenizer.encode("<tool>")
    assert tokenizer.token_bytes(id_) == b"<tool>"


def test_user_defined_markup_is_not_found_in_text() -> None:
    fields = metadata(token_type=(*[1] * (len(BYTES) + 5), 3, 4, 4, 1, 5))
    tokenizer = from_gguf(fields)
    im_end = tokenizer.control_tokens["<|im_end|>"]
    assert im_end not in tokenizer.encode("<|im_end|>")
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [im_end]
    assert im_end in tokenizer.end_of_generation_ids
    assert tokenizer.token_bytes(im_end) == b"<|im_end|>"


def test_tokens_with_a_role_are_control_without_token_types() -> None:
    tokenizer = from_gguf(metadata(token_type=None))
    assert tokenizer.control_tokens.keys() == set(CONTROL)


def test_unused_tokens_have_no_bytes() -> None:
    tokenizer = from_gguf(metadata())
    assert tokenizer.decode(range(tokenizer.vocab_size - 2, tokenizer.vocab_size)) == ""


def test_merge_into_a_control_token_is_dropped() -> None:
    tokenizer = from_gguf(
        metadata(merges=("h e", "l l", "he ll", "hell o"), token_type=(*[1] * 256, 1, 1, 1, 3, *[1] * 6))
    )
    assert "hello" in tokenizer.control_tokens
    assert tokenizer.encode("hello") == [len(BYTES) + 2, BYTES.index("o")]


@pytest.mark.parametrize("minus_one", [-1, 0xFFFF_FFFF])
def test_token_id_of_minus_one_means_no_token(minus_one: int) -> None:
    tokenizer = from_gguf(metadata(bos_token_id=minus_one, add_bos_token=True))
    assert tokenizer.bos_id is None
    assert not tokenizer.add_bos
    assert "bos_token" not in tokenizer.special_tokens


def test_add_bos_defaults_to_the_pre_tokenizer() -> None:
    assert not from_gguf(metadata(pre="smollm")).add_bos
    assert from_gguf(metadata(pre="llama-bpe")).add_bos
    assert not from_gguf(metadata(pre="llama-bpe", add_bos_token=False)).add_bos


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "bert"}, "'bert'"),
        ({"pre": "brand-new"}, "'brand-new'"),
        ({"pre": "default"}, "'default'"),
        ({"pre": None}, "tokenizer.ggml.pre"),
    ],
)
def test_unknown_tokenizer_types_are_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=named) as refusal:
        from_gguf(metadata(**changes))
    assert refusal.value.remedy


SPM = {"model": "llama", "pre": None, "merges": None}
TOKENS = metadata()["tokenizer.ggml.tokens"]
assert isinstance(TOKENS, tuple)
SIZE = len(TOKENS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": 7}, "tokenizer.ggml.model is of type int, not str"),
        ({"pre": 7}, "tokenizer.ggml.pre is of type int"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ()}, "tokenizer.ggml.tokens contains no tokens"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is not an array of str"),
        ({"tokens": (*TOKENS[:-1], 3)}, "tokenizer.ggml.tokens is not an array of str"),
        ({"tokens": (*TOKENS[:-1], "he")}, "tokenizer.ggml.tokens contains 'he' 2 times"),
        ({"tokens": (*TOKENS[:-1], "\ud800")}, "tokenizer.ggml.tokens contains a token that is not valid UTF-8"),
        ({"tokens": (*TOKENS[:-1], "x" * 5000)}, "tokenizer.ggml.tokens contains a token of more than"),
        ({"token_type": (1, 2, 3)}, f"tokenizer.ggml.token_type has 3 elements for {SIZE} tokens"),
        ({"token_type": (1.0,) * SIZE}, "tokenizer.ggml.token_type is not an array of int"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": (1, 2)}, "tokenizer.ggml.merges is not an array of str"),
        ({"merges": ("he",)}, "tokenizer.ggml.merges: the merge of 'he' and ''"),
        ({"merges": ("h é",)}, "tokenizer.ggml.merges: the merge of 'h' and 'é'"),
        ({"merges": ("h l",)}, "tokenizer.ggml.merges: the merge of 'h' and 'l'"),
        ({"merges": ("h \ud800",)}, "tokenizer.ggml.merges: the merge of 'h'"),
        ({"bos_token_id": SIZE}, f"tokenizer.ggml.bos_token_id is {SIZE}, but there are {SIZE} tokens"),
        ({"eos_token_id": -2}, "tokenizer.ggml.eos_token_id is -2"),
        ({"eot_token_id": "1"}, "tokenizer.ggml.eot_token_id is of type str"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is of type int, not bool"),
        (SPM, "tokenizer.ggml.scores is missing"),
        ({**SPM, "scores": (0.0,)}, "tokenizer.ggml.scores has 1 elements"),
        ({**SPM, "scores": (float("nan"),) * SIZE}, "tokenizer.ggml.scores contains a value that is not finite"),
        ({**SPM, "scores": (0.0,) * SIZE}, "no token for the byte 0x00"),
    ],
)
def test_malformed_metadata_error_names_the_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError) as refusal:
        from_gguf(metadata(**changes))
    assert message in refusal.value.message
    assert refusal.value.remedy


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats() | st.text(max_size=4)
VALUES = SCALARS | st.lists(SCALARS, max_size=4).map(tuple)
FIELDS = [
    "model",
    "pre",
    "tokens",
    "token_type",
    "merges",
    "scores",
    "bos_token_id",
    "eot_token_id",
    "add_space_prefix",
]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["gpt2", "llama", "gemma4"]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
    st.data(),
)
def test_any_metadata_raises_only_known_errors(model: str, changes: dict[str, object], data: st.DataObject) -> None:
    fields = metadata(**{"model": model, **changes})
    spoilt = data.draw(st.sampled_from(sorted(fields)))
    array = fields[spoilt]
    if isinstance(array, tuple) and array:
        position = data.draw(st.integers(0, len(array) - 1))
        fields[spoilt] = (*array[:position], data.draw(SCALARS), *array[position + 1 :])
    try:
        tokenizer = from_gguf(fields)
    except InglenookError:
        return
    tokenizer.decode(tokenizer.encode("Hello <|im_end|> wörld", parse_special=True))
