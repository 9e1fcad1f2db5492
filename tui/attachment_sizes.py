"""The sizes of attachments, as the prompt and the messages show them."""

from tui.client import Replies
from tui.types import Attachment


class AttachmentSizes:
    """Token counts by attachment, with the tokenizer of the loaded model."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._tokens: dict[int, int] = {}  # by the hash of the text, so that no text is kept

    def describe(self, file: Attachment) -> str:
        """Return the name and the size: in tokens if `count` has counted them, else in characters."""
        tokens = self._tokens.get(hash(file.text))
        mark = "~" if self._replies.estimates_counts() else ""
        size = f"{len(file.text):,} characters" if tokens is None else f"{mark}{tokens:,} tokens"
        return f"{file.name} ({size})"

    async def count(self, file: Attachment) -> None:
        """Count the tokens of an attachment, unless they are known. Raises ClientError."""
        key = hash(file.text)
        if key not in self._tokens:
            self._tokens[key] = await self._replies.count_tokens(file.text)

    def forget(self) -> None:
        """Forget all counts, because another model is loaded."""
        self._tokens.clear()
