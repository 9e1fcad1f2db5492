import pytest

from app.text.gguf_tokenizer import from_gguf as chat_tokenizer
from app.text.marked_tokenizer import from_gguf
from tests.app.text.small_vocabulary import metadata


@pytest.mark.parametrize(("bos", "eos"), [(False, False), (True, False), (False, True), (True, True)])
def test_markers_come_from_metadata(bos: bool, eos: bool) -> None:
    fields = metadata(add_bos_token=bos, add_eos_token=eos)
    chat = chat_tokenizer(fields)
    assert chat.bos_id is not None
    assert chat.eos_id is not None
    begin, end = (chat.bos_id,) * bos, (chat.eos_id,) * eos
    tokenizer = from_gguf(fields)
    assert tokenizer.encode("hello w") == (*begin, *chat.encode("hello w"), *end)
    assert tokenizer.encode("hello w", max_ids=len(begin) + len(end) + 1) == (*begin, *chat.encode("hello"), *end)
    assert tokenizer.encode("<|im_end|>")[len(begin) : -1 if eos else None] == tuple(chat.encode("<|im_end|>"))
    assert tokenizer.vocab_size == chat.vocab_size
