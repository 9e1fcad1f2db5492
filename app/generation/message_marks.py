"""Message marks: the numbers of prompt tokens after which the next prompts of a conversation may differ.

Many templates drop the reasoning of earlier replies when there is a new question, but keep it while tools are called.
So the next prompt often differs after the last question; other conversations differ after the first message.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence

from app.generation.conversation import Message
from app.text.tokenizer import Tokenizer
from engine.request import message_ends


def message_marks(
    messages: Sequence[Message], rendered: str, prompt_ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Return the numbers of tokens at the end of the first message and of each question, ascending.

    If the end tokens of the rendered text are not those of the prompt, all ends of messages are returned.
    """
    ends = message_ends(prompt_ids, tokenizer.end_of_generation_ids)
    texts = "|".join(re.escape(tokenizer.raw_text(token_id)) for token_id in tokenizer.end_of_generation_ids)
    positions = [match.start() for match in re.finditer(texts, rendered)] if texts else []
    if len(positions) != len(ends):
        return ends
    numbers = {0} | {bisect_left(positions, stop) for stop in _question_ends(messages, rendered, tokenizer)}
    return tuple(ends[number] for number in sorted(numbers) if number < len(ends))


def _question_ends(messages: Sequence[Message], rendered: str, tokenizer: Tokenizer) -> list[int]:
    """Return the positions at which the texts of questions end. Texts that the template has changed are left out."""
    found, stop = [], 0
    for message in messages:
        text = tokenizer.protect(message.content).strip()
        start = rendered.find(text, stop) if text else -1
        if start >= 0:
            stop = start + len(text)
            if message.role == "user":
                found.append(stop)
    return found
