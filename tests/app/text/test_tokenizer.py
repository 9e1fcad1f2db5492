import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import app.text.tokenizer
from app.errors import UnsupportedTokenizer
from app.text.control_tokens import MARK
from app.text.gguf_tokenizer import from_gguf
from app.text.tokenizer import TextEncoder, Tokenizer
from quant.gguf import GGUFFile
from tests.app.text.small_vocabulary import metadata


@pytest.fixture(scope="module")
def smollm(llama_cpp_models: Path) -> Tokenizer:
    """A complete byte-level vocabulary with SmolLM2's pre-tokenizer."""
    with GGUFFile(llama_cpp_models / "ggml-vocab-gpt-2.gguf") as file:
        return from_gguf({**file.metadata, "tokenizer.ggml.pre": "smollm"})


@pytest.fixture(scope="module")
def llama2(vocabularies: Callable[[str], Tokenizer]) -> Tokenizer:
    return vocabularies("llama-spm")


@pytest.fixture(scope="module")
def qwen(vocabularies: Callable[[str], Tokenizer]) -> Tokenizer:
    return vocabularies("qwen2")


@given(st.text())
def test_any_text_round_trips(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    assert b"".join(map(smollm.token_bytes, ids)) == text.encode()
    assert smollm.decode(ids) == text


@given(st.text().filter(lambda text: "\u2581" not in text))
def test_any_text_round_trips_with_sentencepiece(llama2: Tokenizer, text: str) -> None:
    assert llama2.decode(llama2.encode(text)) == text


def test_continuation_adds_no_space(smollm: Tokenizer, llama2: Tokenizer) -> None:
    for tokenizer in (smollm, llama2):
        for text in ("lo there", " there", "  two", "\nline", "\n\n", "é", "🦙", "x" * 50):
            ids = tokenizer.encode_continuation(text)
            assert ids is not None
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_only_plain_text_has_plain_bytes(smollm: Tokenizer) -> None:
    assert {smollm.plain_bytes(token_id) for token_id in smollm.control_tokens.values()} == {b""}
    assert smollm.plain_bytes(smollm.encode("hello")[0]) == b"hello"
    assert smollm.plain_bytes(smollm.vocab_size) == b""


def test_longest_token_equals_the_maximum_byte_length(smollm: Tokenizer, llama2: Tokenizer) -> None:
    for tokenizer in (smollm, llama2, from_gguf(metadata())):
        lengths = [len(tokenizer.token_bytes(it, show_control=True)) for it in range(tokenizer.vocab_size)]
        assert tokenizer.longest_token == max(lengths)


def test_fingerprints_differ_between_vocabularies() -> None:
    first = metadata()["tokenizer.ggml.tokens"]
    assert isinstance(first, tuple)
    swapped = metadata(tokens=(first[1], first[0], *first[2:]))
    identities = [from_gguf(one).fingerprint for one in (metadata(), metadata(chat_template="other"), swapped)]
    assert identities[0] == identities[1] != identities[2]


def test_lone_surrogates_are_replaced(smollm: Tokenizer) -> None:
    assert smollm.decode(smollm.encode("a\ud83db")) == "a\ufffdb"
    assert smollm.decode(smollm.encode("a\udc00<|endoftext|>", parse_special=True)) == "a\ufffd"
    assert smollm.decode(smollm.encode_rendered("a\ud83d")) == "a\ufffd"


def test_control_tokens_are_parsed_only_on_request(qwen: Tokenizer) -> None:
    im_start, im_end = qwen.control_tokens["<|im_start|>"], qwen.control_tokens["<|im_end|>"]
    text = "<|im_start|>user\nhi<|im_end|>\n"
    assert qwen.encode(text, parse_special=True) == [im_start, *qwen.encode("user\nhi"), im_end, *qwen.encode("\n")]
    assert not {im_start, im_end} & set(qwen.encode(text))
    assert qwen.decode(qwen.encode(text)) == text


def test_encoding_adds_no_bos_token(llama2: Tokenizer) -> None:
    assert llama2.add_bos
    assert llama2.encode("") == llama2.encode("", parse_special=True) == []
    assert llama2.bos_id not in llama2.encode("Hello", parse_special=True)


def test_control_token_bytes_are_shown_only_on_request(qwen: Tokenizer) -> None:
    im_end = qwen.control_tokens["<|im_end|>"]
    assert qwen.token_bytes(im_end) == b""
    assert qwen.token_bytes(im_end, show_control=True) == b"<|im_end|>"
    assert qwen.decode([*qwen.encode("hi"), im_end]) == "hi"


def test_sentencepiece_tokens_have_exact_bytes(llama2: Tokenizer) -> None:
    assert llama2.token_bytes(3) == b"\x00"
    assert llama2.token_bytes(3 + 0xF0) == b"\xf0"
    assert llama2.token_bytes(llama2.encode("Hello")[0]) == b" Hello"


def test_ids_outside_the_vocabulary_have_no_bytes(smollm: Tokenizer) -> None:
    assert smollm.token_bytes(smollm.vocab_size) == b""
    assert smollm.token_bytes(-1) == b""


def test_partial_character_decodes_to_a_replacement(smollm: Tokenizer) -> None:
    assert smollm.decode(smollm.encode("🦙")[:1]) == "\ufffd"


def test_rendered_chat_without_markup_encodes_as_a_whole(qwen: Tokenizer) -> None:
    contents = ["Be brief.", "What is 1 < 2 | 3?", "x" * 500]
    rendered = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents)
    protected = "".join(f"<|im_start|>user\n{qwen.protect(content)}<|im_end|>\n" for content in contents)
    assert qwen.encode_rendered(protected) == qwen.encode(rendered, parse_special=True)


MARKUP = st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "<|", "|>", "user\n", "a", MARK]))


@given(MARKUP.map("".join), MARKUP.map("".join))
def test_protected_contents_encode_as_plain_text(qwen: Tokenizer, system: str, user: str) -> None:
    im_start, im_end = qwen.control_tokens["<|im_start|>"], qwen.control_tokens["<|im_end|>"]
    ids = qwen.encode_rendered(f"<|im_start|>{qwen.protect(system)}{qwen.protect(user)}<|im_end|>")
    contents = (system + user).replace(MARK, "\ufffd")
    assert ids == [im_start, *qwen.encode(contents), im_end]


def test_threads_share_a_tokenizer() -> None:
    texts = [f"<|im_end|>hello {number} worlds<tool>{'hell' * (number % 7)}" for number in range(300)]
    expected = [from_gguf(metadata()).encode(text, parse_special=True) for text in texts[:7]]
    shared = from_gguf(metadata())
    results: list[list[list[int]]] = []

    def encode_all() -> None:
        results.append([shared.encode(text, parse_special=True) for text in texts])

    threads = [threading.Thread(target=encode_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(result == results[0] for result in results)
    assert results[0][:7] == expected


class CountingBackend:
    """A backend with one id per character that counts its calls."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list["CountingBackend"]:
        assert not add_special_tokens
        [text] = texts
        self.encoded.append(text)
        self.ids = list(map(ord, text))
        return [self]


def counting_encoder() -> tuple[TextEncoder, CountingBackend]:
    backend = CountingBackend()
    return TextEncoder(cast(tokenizers.Tokenizer, backend)), backend


def test_repeated_text_is_not_encoded_again() -> None:
    encoder, backend = counting_encoder()
    assert list(encoder.encode("ab", at_start=True)) == list(encoder.encode("ab", at_start=False)) == [97, 98]
    assert backend.encoded == ["ab"]


def test_cache_is_bounded_and_drops_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.text.tokenizer, "REMEMBERED_CHARACTERS", 4)
    encoder, backend = counting_encoder()
    for text in ("ab", "cd", "ab", "ef", "ab", "cd", "longer", "longer"):
        assert list(encoder.encode(text, at_start=False)) == list(map(ord, text))
    assert backend.encoded == ["ab", "cd", "ef", "cd", "longer", "longer"]


def test_library_panic_raises_a_typed_error() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    # A pattern with endless backtracking, to which the library responds with a panic.
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    with pytest.raises(UnsupportedTokenizer, match="encoding text"):
        TextEncoder(backend).encode("a" * 40 + "b", at_start=True)
