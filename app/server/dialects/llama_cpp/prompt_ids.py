"""The token ids of prompts of llama.cpp's server, whatever their shape."""

from app.chat.service import ChatService
from app.server.continuation import text_prompt
from app.server.dialects.llama_cpp.prompts import OnePrompt
from app.server.errors import naming


async def encoded(service: ChatService, prompt: OnePrompt, field: str) -> tuple[int, ...]:
    """The ids of a prompt, with a token in front that begins a text if the prompt begins with text.

    Raises InvalidRequest for a prompt that is empty, too long, or not of the vocabulary.
    """
    if isinstance(prompt, str):
        return await text_prompt(service, prompt, field)
    first, *rest = prompt
    with naming(field):
        begun = (first,) if isinstance(first, int) else await service.encode_text(first)
    return await text_prompt(service, (*begun, *await service.encode_mixed(rest)), field)
