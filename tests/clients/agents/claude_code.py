"""Claude Code."""

from collections.abc import Sequence

from tests.clients.agents.agent import Agent, Asked, Start, json_lines, main


def start(asked: Asked) -> Start:
    """With the variables of docs/integrations.md."""
    flags = ["--output-format", "stream-json", "--verbose", "--include-partial-messages"] if asked.shows_pieces else []
    environment = {
        "ANTHROPIC_BASE_URL": asked.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": asked.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(asked.context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    return Start(["claude", "-p", asked.prompt, *flags], environment)


def pieces(output: str) -> Sequence[str]:
    """Text deltas of the events that it passes on."""
    events = [line["event"] for line in json_lines(output) if line.get("type") == "stream_event"]
    deltas = [event["delta"] for event in events if isinstance(event, dict) and "delta" in event]
    return [delta["text"] for delta in deltas if delta.get("type") == "text_delta"]


if __name__ == "__main__":
    main(Agent(start, pieces, too_long="prompt is too long"))
