"""Prompts contain the generated ids of earlier replies, with real vocabularies and templates.

The replies are random tokens, because encoding their text hardly ever gives the same tokens again.
"""

import copy
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from app.generation.conversation import Conversation, Json, Message
from app.generation.prompt_encoder import PromptEncoder
from app.generation.remembered_replies import GeneratedReply
from app.generation.reply_token_cache import ReplyTokenCache
from app.generation.template import ChatTemplateRenderer
from app.text.control_tokens import MARK
from app.text.detokenizer import IncrementalDetokenizer
from app.text.gguf_tokenizer import from_gguf
from app.text.tokenizer import Tokenizer, byte_level_bytes
from quant.gguf import GGUFFile
from tests.app.text.small_vocabulary import BYTES, metadata

ALPACA = (
    "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
# keys: names of models; values: vocabulary and template
MODELS = {
    "ChatML": ("qwen2", "Qwen-Qwen2.5-7B-Instruct"),
    "Llama 3, which strips": ("llama-bpe", "meta-llama-Llama-3.1-8B-Instruct"),
    "Gemma": ("gemma-3", "google-gemma-2-2b-it"),
    "Phi 3, of SentencePiece": ("phi-3", "microsoft-Phi-3.5-mini-instruct"),
    "Qwen 3, which drops thinking": ("qwen2", "Qwen-Qwen3-0.6B"),
    "without control tokens": ("gpt-2", None),
}
DROPPING = {"Gemma 4, which drops an empty thought": ("gemma-4", "google-gemma-4-31B-it")}


@pytest.fixture(scope="module")
def models(
    llama_cpp_models: Path, gemma3: Path, vocabularies: Callable[[str], Tokenizer]
) -> Callable[[str], Tokenizer]:
    @functools.cache
    def of_vocabulary(name: str) -> Tokenizer:
        if name != "gemma-3":
            return vocabularies(name)
        with GGUFFile(gemma3) as file:
            return from_gguf(file.metadata)

    def load(name: str) -> Tokenizer:
        vocabulary, file_name = (MODELS | DROPPING)[name]
        tokenizer = copy.copy(of_vocabulary(vocabulary))
        tokenizer.chat_template = ALPACA
        if file_name is not None:
            tokenizer.chat_template = (llama_cpp_models / "templates" / f"{file_name}.jinja").read_text("utf-8")
        return tokenizer

    return load


def told_text(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = (), *, continues: bool = False) -> str:
    text = IncrementalDetokenizer(tokenizer, stop, continues_text=continues)
    return "".join([*map(text.push, ids), text.finish()])


def words(tokenizer: Tokenizer, rng: random.Random, count: int) -> list[int]:
    """Return random tokens of whole characters. The first and last ones are not white space, which templates strip."""
    while True:
        ids: list[int] = []
        while len(ids) < count:
            token_id = rng.randrange(tokenizer.vocab_size)
            text = tokenizer.plain_bytes(token_id).decode(errors="replace")
            if tokenizer.space_prefix and not ids:
                text = text[1:] if text.startswith(" ") else ""
            is_outer = len(ids) in (0, count - 1)
            if text and "\ufffd" not in text and MARK not in text and not (is_outer and text.strip() != text):
                ids.append(token_id)
        if "think" not in tokenizer.decode(ids) and tokenizer.encode(tokenizer.decode(ids)) != ids:
            return ids


@dataclass
class Chat:
    """Simulates a client that keeps a conversation, and encodes its prompts."""

    tokenizer: Tokenizer
    renderer: ChatTemplateRenderer
    reply_tokens: ReplyTokenCache = field(default_factory=ReplyTokenCache)
    messages: list[Message] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.encoder = PromptEncoder(self.tokenizer, self.renderer, self.reply_tokens)

    def ask(self, question: str) -> tuple[int, ...]:
        self.messages.append(Message("user", question))
        self.prompt_ids = self.encoder.encode(self.messages)
        return self.prompt_ids

    def reply(self, ids: Sequence[int], stop: Sequence[str] = (), *, stored: bool = True) -> str:
        """Add a reply of the model to the conversation. The client keeps only the text."""
        told = told_text(self.tokenizer, ids, stop)
        self.encoder.remember(GeneratedReply(self.prompt_ids, ids, told, continues_text=False, stored=stored))
        self.messages.append(Message("assistant", told))
        return told

    def replace_reply(self, text: str) -> None:
        """Replace the last reply by other text."""
        self.messages[-1] = Message("assistant", text)

    def without_memory(self) -> tuple[int, ...]:
        return PromptEncoder(self.tokenizer, self.renderer, ReplyTokenCache()).encode(self.messages)


def decoded_parts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int | bytes]:
    """Return the control tokens, and the bytes between them."""
    control = frozenset(tokenizer.control_tokens.values())
    parts: list[int | bytes] = [b""]
    for token_id in ids:
        last = parts[-1]
        if token_id in control:
            parts += [token_id, b""]
        else:
            assert isinstance(last, bytes)
            parts[-1] = last + tokenizer.token_bytes(token_id)
    return parts


def end_token(tokenizer: Tokenizer) -> list[int]:
    return sorted(tokenizer.end_of_generation_ids)[:1]


@pytest.mark.share(3)
@pytest.mark.parametrize("name", MODELS)
def test_prompt_starts_with_previous_prompt_and_reply(
    models: Callable[[str], Tokenizer], renderer: ChatTemplateRenderer, name: str
) -> None:
    rng = random.Random(name)
    tokenizer = models(name)
    chat = Chat(tokenizer, renderer)
    prompts, replies = [chat.ask("Begin.")], []
    for turn in range(5):
        replies.append(words(tokenizer, rng, 40))
        chat.reply(replies[-1] + (end_token(tokenizer) if turn % 2 else []))
        prompts.append(chat.ask(f"Go on, {turn} <|im_end|> [/INST] </s>"))
    for reply, (before, after) in zip(replies, pairwise(prompts), strict=True):
        assert after[: len(before) + len(reply)] == (*before, *reply)
        assert decoded_parts(tokenizer, after[: len(before)]) == decoded_parts(tokenizer, before)
    again = chat.without_memory()
    assert again != prompts[-1]
    assert decoded_parts(tokenizer, again) == decoded_parts(tokenizer, prompts[-1])


@pytest.mark.parametrize("preserved", [False, True])
def test_template_that_preserves_reasoning_continues_the_whole_reply(
    vocabularies: Callable[[str], Tokenizer], llama_cpp_models: Path, renderer: ChatTemplateRenderer, preserved: bool
) -> None:
    """The variable `preserve_thinking` is that of Qwen 3.6; the template of Qwen 3.5 is the same without it."""
    tokenizer = copy.copy(vocabularies("qwen2"))
    template = (llama_cpp_models / "templates" / "Qwen3.5-4B.jinja").read_text("utf-8")
    drops = "loop.index0 > ns.last_query_index"
    assert template.count(drops) == 1
    tokenizer.chat_template = template.replace(drops, f"preserve_thinking or {drops}")
    encoder, rng = PromptEncoder(tokenizer, renderer, ReplyTokenCache()), random.Random(1)
    variables: dict[str, Json] = {"preserve_thinking": preserved}
    question = Message("user", "Begin.")
    prompt, rendered = encoder.encode_conversation(Conversation([question], variables=variables))
    assert rendered.endswith("<think>\n")
    thought, answer = words(tokenizer, rng, 20), words(tokenizer, rng, 20)
    reply = [*thought, *tokenizer.encode("\n</think>\n\n", parse_special=True), *answer, *end_token(tokenizer)]
    told = told_text(tokenizer, reply)
    encoder.remember(GeneratedReply(prompt, reply, told, continues_text=False, stored=True))
    messages = [question, Message("assistant", tokenizer.decode(answer), tokenizer.decode(thought))]
    messages.append(Message("user", "Go on."))
    after, _ = encoder.encode_conversation(Conversation(messages, variables=variables))
    whole = (*prompt, *reply)
    shared = next((at for at, (a, b) in enumerate(zip(whole, after, strict=False)) if a != b), len(whole))
    if preserved:
        assert shared >= len(whole) - 1  # the template may write another end token
    else:
        assert len(prompt) - 3 <= shared <= len(prompt)


def test_continued_texts_keep_generated_ids(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    rng = random.Random(1)
    encoder = PromptEncoder(tokenizer, renderer, ReplyTokenCache())
    text, expected = "Once upon a time", list(tokenizer.encode("Once upon a time"))
    for turn in range(4):
        prompt_ids = encoder.encode_text(text)
        assert list(prompt_ids) == expected
        ids = words(tokenizer, rng, 30)
        told = told_text(tokenizer, ids, continues=True)
        encoder.remember(GeneratedReply(prompt_ids, ids, told, continues_text=True, stored=True))
        more = f" {turn} and then, "
        text += told + more
        expected += ids + tokenizer.encode(more)


HOSTILE = ("<|im_end|>", "<|im_start|>system\n", "<|im_", "end|>", MARK, "</s>", "\x00", "é", " ", "\n", "🦙")


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice((*HOSTILE, "a", "hello ")) for _ in range(rng.randrange(8)))


def client_edit(rng: random.Random, text: str) -> str:
    """Return the text of a reply as a client may change it."""
    cut = rng.randrange(len(text) + 1)
    choices = [text, text, text, text.strip(), text[:cut], text[cut:], text + random_text(rng), random_text(rng)]
    return rng.choice([*choices, text[:cut] + random_text(rng) + text[cut:]])


@pytest.mark.share(3)
@pytest.mark.parametrize("name", [*MODELS, *DROPPING])
def test_remembered_replies_never_change_the_text(
    models: Callable[[str], Tokenizer], renderer: ChatTemplateRenderer, name: str
) -> None:
    """The prompt has the same control tokens and bytes as without remembered replies."""
    rng = random.Random(name)
    tokenizer = models(name)
    control = sorted(tokenizer.control_tokens.values())
    spaces = [i for t in (" ", "\n", "\n\n", "  ") for i in tokenizer.encode(t)]
    reply_tokens = ReplyTokenCache()
    spliced = 0
    for _ in range(12):
        chat = Chat(tokenizer, renderer, reply_tokens)
        for _ in range(3):
            chat.ask(rng.choice(["Hello", "", random_text(rng)]))
            for _ in range(rng.choice([1, 1, 3])):  # the last of several replies is continued
                ids = [
                    rng.choice([rng.randrange(tokenizer.vocab_size), rng.choice(spaces), rng.choice(control or [0])])
                    if rng.random() < 0.3
                    else rng.choice(words(tokenizer, rng, 3))
                    for _ in range(rng.randrange(12))
                ]
                told = chat.reply(ids, stop=rng.choice([(), ("e",), (" ",)]))
                last = chat.messages.pop()
            chat.messages.append(last)
            chat.replace_reply(client_edit(rng, told))
            with_memory = chat.encoder.encode(chat.messages)
            without = chat.without_memory()
            assert decoded_parts(tokenizer, with_memory) == decoded_parts(tokenizer, without)
            spliced += with_memory != without
    assert spliced > 3 or name in DROPPING


def test_ids_before_a_stop_string_are_kept(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    chat = Chat(tokenizer, renderer)
    before = chat.ask("Count.")
    ids = [*map(tokenizer.encode, ("on", "e,", " two", " thr"))]
    flat = [token_id for several in ids for token_id in several]
    assert chat.reply([*flat, *tokenizer.encode(" four five")], stop=["r four"]) == "one, two th"
    after = chat.ask("Go on.")
    kept = [token_id for several in ids[:3] for token_id in several]
    assert after[len(before) :][: len(kept)] == tuple(kept)
    assert decoded_parts(tokenizer, after) == decoded_parts(tokenizer, chat.without_memory())


@pytest.mark.parametrize("name", ["ChatML", "Llama 3, which strips", "without control tokens"])
def test_stripped_white_space_drops_only_its_own_tokens(
    models: Callable[[str], Tokenizer], renderer: ChatTemplateRenderer, name: str
) -> None:
    chat = Chat(tokenizer := models(name), renderer)
    before = chat.ask("Hello")
    ids = words(tokenizer, random.Random(3), 20)
    told = chat.reply([*ids, *tokenizer.encode(" "), *tokenizer.encode("\n")])
    assert told.endswith(" \n")
    chat.replace_reply(told.rstrip())
    assert chat.ask("Go on.")[: len(before) + len(ids)] == (*before, *ids)


def test_partial_character_at_the_end_is_dropped(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    """The client receives a replacement character, whose first byte equals that of the partial character."""
    chat = Chat(tokenizer, renderer)
    before = chat.ask("Hello")
    ids = words(tokenizer, random.Random(9), 5)
    [half] = [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.plain_bytes(token_id) == b"\xef"]
    assert chat.reply([*ids, half]).endswith("\ufffd")
    after = chat.ask("Go on.")
    assert after[: len(before) + 5] == (*before, *ids)
    assert decoded_parts(tokenizer, after) == decoded_parts(tokenizer, chat.without_memory())


def test_characters_are_never_split(renderer: ChatTemplateRenderer) -> None:
    """A token contains half of a character and a letter. The client keeps only the character."""
    small = metadata()
    tokens, types = small["tokenizer.ggml.tokens"], small["tokenizer.ggml.token_type"]
    assert isinstance(tokens, tuple)
    assert isinstance(types, tuple)
    spelling = {byte_level_bytes(character)[0]: character for character in BYTES}
    halves = ["".join(spelling[byte] for byte in half) for half in (b"\xf0\x9f", b"\xa6\x99b")]
    tokenizer = from_gguf(metadata(tokens=(*tokens, *halves), token_type=(*types, 1, 1)))
    encoder = PromptEncoder(tokenizer, renderer, ReplyTokenCache())
    before = encoder.encode_text("hello")
    ids = [*tokenizer.encode("w"), len(tokens), len(tokens) + 1]
    told = told_text(tokenizer, ids, continues=True)
    assert told == "w🦙b"
    encoder.remember(GeneratedReply(before, ids, told, continues_text=True, stored=True))
    assert encoder.encode_text("hello" + told) == (*before, *ids)
    assert tokenizer.decode(encoder.encode_text("hello" + told[:-1])) == "hello" + told[:-1]


def test_reply_ids_are_reused_only_after_the_same_prompt(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    encoder = PromptEncoder(tokenizer, renderer, ReplyTokenCache())
    ids = words(tokenizer, random.Random(10), 5)
    told = told_text(tokenizer, ids, continues=True)
    encoder.remember(GeneratedReply(encoder.encode_text("One:"), ids, told, continues_text=True, stored=True))
    assert encoder.encode_text("One:" + told)[-5:] == tuple(ids)
    assert list(encoder.encode_text("Two:" + told)) == tokenizer.encode("Two:" + told)


@pytest.mark.parametrize("name", ["Phi 3, of SentencePiece", "Gemma"])
def test_reply_to_an_empty_prompt_is_remembered(
    models: Callable[[str], Tokenizer], renderer: ChatTemplateRenderer, name: str
) -> None:
    """The prompt is only the BOS token."""
    tokenizer = models(name)
    encoder = PromptEncoder(tokenizer, renderer, ReplyTokenCache())
    before = encoder.encode_text("")
    assert before == (tokenizer.bos_id,)
    ids = words(tokenizer, random.Random(11), 5)
    told = told_text(tokenizer, ids)
    encoder.remember(GeneratedReply(before, ids, told, continues_text=False, stored=True))
    after = encoder.encode_text(told + "\nmore")
    assert after[:6] == (*before, *ids)
    again = PromptEncoder(tokenizer, renderer, ReplyTokenCache()).encode_text(told + "\nmore")
    assert decoded_parts(tokenizer, after) == decoded_parts(tokenizer, again)


def test_ids_of_the_chosen_reply_are_used(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    rng = random.Random(4)
    chat = Chat(tokenizer, renderer)
    before = chat.ask("Hello")
    first = words(tokenizer, rng, 10)
    replies = [first, first + words(tokenizer, rng, 10), first[:5], words(tokenizer, rng, 10)]
    for ids in replies:
        chat.reply(ids)
        chat.messages.pop()
    for ids in replies:
        chat.messages[1:] = [Message("assistant", told_text(tokenizer, ids))]
        assert chat.ask("Go on.")[: len(before) + len(ids)] == (*before, *ids)


def test_text_never_becomes_a_generated_control_token(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    chat = Chat(tokenizer, renderer)
    before = chat.ask("Hello")
    start, end = tokenizer.control_tokens["<|im_start|>"], tokenizer.control_tokens["<|im_end|>"]
    rng = random.Random(5)
    one, two = words(tokenizer, rng, 5), words(tokenizer, rng, 5)
    chat.reply([*one, start, *two])
    shown = told_text(tokenizer, one) + "<|im_start|>" + told_text(tokenizer, two)
    for text in (chat.messages[-1].content, shown):
        chat.replace_reply(text)
        after = chat.encoder.encode(chat.messages)
        assert after[: len(before) + len(one)] == (*before, *one)
        assert start not in after[len(before) : after.index(end, len(before))]


@pytest.mark.parametrize("shown", ["", "<|im_start|>"])
def test_reply_with_control_tokens_is_reused_if_the_template_writes_them(tokenizer: Tokenizer, shown: str) -> None:
    """`A<|im_start|>B` is reused if the template itself writes the token between two contents."""
    start = tokenizer.control_tokens["<|im_start|>"]
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>"
        "{% else %}{{ m.reasoning_content }}<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    rng = random.Random(6)
    one, two = words(tokenizer, rng, 5), words(tokenizer, rng, 5)

    class Rendering(ChatTemplateRenderer):
        def render(self, _template: str, messages: Sequence[Message], **options: object) -> str:  # type: ignore[override]
            return super().render(template, messages)

    with Rendering() as renderer:
        encoder = PromptEncoder(tokenizer, renderer, ReplyTokenCache())
        before = encoder.encode([Message("user", "Hello")])
        told = told_text(tokenizer, one) + shown + told_text(tokenizer, two)
        encoder.remember(GeneratedReply(before, [*one, start, *two], told, continues_text=False, stored=True))
        reply = Message("assistant", told_text(tokenizer, two), reasoning=told_text(tokenizer, one))
        after = encoder.encode([Message("user", "Hello"), reply])
    assert after[: len(before) + 11] == (*before, *one, start, *two)


def test_forget_removes_only_one_conversation(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    reply_tokens, rng = ReplyTokenCache(), random.Random(7)
    deleted, kept = Chat(tokenizer, renderer, reply_tokens), Chat(tokenizer, renderer, reply_tokens)
    for chat, question in ((deleted, "Hello"), (kept, "Good morning")):
        for _ in range(3):
            chat.ask(question)
            chat.reply(words(tokenizer, rng, 10))
        chat.ask("Go on.")
    assert deleted.encoder.encode(deleted.messages) != deleted.without_memory()
    deleted.encoder.forget(deleted.messages)
    assert deleted.encoder.encode(deleted.messages) == deleted.without_memory()
    assert kept.encoder.encode(kept.messages) == kept.prompt_ids != kept.without_memory()


def test_text_is_encoded_once(models: Callable[[str], Tokenizer], renderer: ChatTemplateRenderer) -> None:
    tokenizer = models("ChatML")
    chat = Chat(tokenizer, renderer)
    rng = random.Random(8)
    chat.ask("How does this work? " * 500)
    for turn in range(20):
        chat.reply(words(tokenizer, rng, 200))
        before, question = tokenizer.characters_encoded, f"And {turn}?"
        chat.ask(question)
        assert tokenizer.characters_encoded - before <= len(f"user\n{question}")


@pytest.mark.parametrize(
    ("template", "before"),
    [
        ("Qwen-Qwen3-0.6B", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "<｜Assistant｜>"),
        ("openai-gpt-oss-120b", "<|start|>assistant<|channel|>final<|message|>"),
        ("meta-llama-Llama-3.1-8B-Instruct", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    ],
)
def test_prompt_ends_with_the_reply_prefix(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer, llama_cpp_models: Path, template: str, before: str
) -> None:
    model = copy.copy(tokenizer)
    model.chat_template = (llama_cpp_models / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
    encoder = PromptEncoder(model, renderer, ReplyTokenCache())
    for begun in ("So <|im_end|>", "So it is: "):
        _, rendered = encoder.encode_conversation(Conversation([Message("user", "Why?")], reply_prefix=begun))
        assert rendered.replace(MARK, "").endswith(f"{before}{begun}")
    _, rendered = encoder.encode_conversation(Conversation([Message("user", "Why?")], reply_prefix=" "))
    assert rendered == encoder.encode_conversation(Conversation([Message("user", "Why?")]))[1] + " "
