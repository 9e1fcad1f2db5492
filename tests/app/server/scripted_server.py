"""A test server whose model generates a scripted text."""

from collections.abc import Sequence
from typing import Any

from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from engine.config import EngineConfig
from engine.core import Engine
from engine.step import SampledToken
from tests.app.server.live_server import ControlledRunner, LiveServer
from tests.support.hash_model import HashTicket


class ScriptedRunner(ControlledRunner):
    """Generates the scripted tokens for every prompt."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.script: Sequence[int] = ()
        self._said: dict[int, int] = {}

    def _sample(self, seen: Any, request_id: int, variant: int, alternatives: int | None) -> SampledToken:
        sampled = super()._sample(seen, request_id, variant, alternatives)
        said = self._said.get(request_id, 0)
        token_id = self.script[min(said, len(self.script) - 1)]
        self._said[request_id] = said + 1
        self.last_tokens[request_id] = token_id
        logprobs = sampled.logprobs and type(sampled.logprobs)(token_id, -0.5, ())
        return SampledToken(request_id, token_id, logprobs)


class ScriptedServer(LiveServer):
    def __init__(self, tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
        config = EngineConfig("scripted", 2048, 520, max_step_tokens=256, max_running=8)
        self.runner = ScriptedRunner(config)
        engine: Engine[HashTicket] = Engine(config, tokenizer.vocab_size, self.runner)
        super().__init__("scripted", engine, tokenizer, renderer)

    def says(self, text: str, end: str = "<|im_end|>") -> int:
        """Make `text` the text of all further replies, and return its number of tokens. `end` is the token after it."""
        [end_id] = self.service.tokenizer.encode(end, parse_special=True)
        self.runner.script = [*self.service.tokenizer.encode(text, parse_special=True), end_id]
        return len(self.runner.script)
