"""Claude Code with the Anthropic API."""

from collections.abc import Sequence

from tests.clients.agents.agent import Agent, Invocation, Request, json_lines, main


def invocation(request: Request) -> Invocation:
    """Return the command that runs Claude Code, with the environment variables from docs/integrations.md."""
    flags = (
        ["--output-format", "stream-json", "--verbose", "--include-partial-messages"] if request.shows_pieces else []
    )
    environment = {
        "ANTHROPIC_BASE_URL": request.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": request.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(request.context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    return Invocation(["claude", "-p", request.prompt, *flags], environment)


def pieces(output: str) -> Sequence[str]:
    """Return the text deltas of the stream events in the output."""
    events = [line["event"] for line in json_lines(output) if line.get("type") == "stream_event"]
    deltas = [event["delta"] for event in events if isinstance(event, dict) and "delta" in event]
    return [delta["text"] for delta in deltas if delta.get("type") == "text_delta"]


if __name__ == "__main__":
    main(Agent(invocation, pieces, too_long="prompt is too long"))
