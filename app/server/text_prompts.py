"""Prompts of completions, which are plain text or token ids. Errors name the field of the prompt.

Control tokens in a prompt are encoded as such, for clients that write the markup of a chat themselves.
"""

from contextlib import suppress
from dataclasses import replace

from app.generation.service import ChatService
from app.server.http.errors import InvalidRequest, check_vocabulary, convert_errors
from app.text.infilling import Gap
from engine.errors import PromptTooLong


async def text_prompt(service: ChatService, prompt: str | tuple[int, ...], field: str = "prompt") -> tuple[int, ...]:
    """Return the ids of a prompt from `field`. Raises InvalidRequest if it is empty, too long, or not in the
    vocabulary.
    """
    with convert_errors(field):
        ids = await service.encode_text(prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise InvalidRequest(f"{field}: it is empty", "Send at least one token.", parameter=field)
    check_vocabulary(ids, service.vocab_size, field)
    return ids


async def infill_prompt(service: ChatService, gap: Gap, field: str = "suffix") -> tuple[int, ...]:
    """Return the ids of a prompt for the text between two others.

    Raises InvalidRequest naming `field` if the model has no tokens for infilling, or the texts are too long.
    """
    with convert_errors(field):
        ids = await service.encode_infill(gap)
    if ids is None:
        problem = f"{service.name} does not support infilling"
        raise InvalidRequest(
            f"{field}: {problem}", "Leave it out, or serve a model with infill tokens.", parameter=field
        )
    return ids


async def infill_prompt_that_fits(
    service: ChatService, gap: Gap, reply_tokens: int, field: str
) -> tuple[tuple[int, ...], int]:
    """Return the ids of an infill prompt that leaves `reply_tokens` for the reply, and the number of files left out.

    The first of the other files are left out until the prompt fits. Raises the errors of `infill_prompt`.
    """
    kept = gap
    while kept.others:
        with suppress(PromptTooLong):
            ids = await service.encode_infill(kept)
            if ids is None or len(ids) + reply_tokens <= service.context_length:
                break
        kept = replace(kept, others=kept.others[1 + len(kept.others) // 4 :])
    return await infill_prompt(service, kept, field), len(gap.others) - len(kept.others)
