"""Reply options: a caller's choice of what a reply reports besides its plain text. Dialects fill them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """The options of one reply."""

    includes_stop: bool = False  # the text ends with the stop string, or with the token, that ended it
    shows_control: bool = False  # control tokens are written out, but for those that end the reply
    reports_tokens: bool = False  # a GeneratedTokens event comes before the text of its tokens
    reports_progress: bool = False  # a PromptProgress event reports the end of each prompt, also of a short one


PLAIN_REPLY = ReplyOptions()
