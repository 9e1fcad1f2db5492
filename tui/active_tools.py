"""Describes how many tools a chat offers to the model."""

from collections.abc import Sequence

from tui.types import ToolServer


def count_active(servers: Sequence[ToolServer], disabled: frozenset[str]) -> str:
    """Return "5 of 7 tools active in this chat"; empty if there are no servers."""
    if not servers:
        return ""
    names = {tool.name for server in servers for tool in server.tools}
    return f"{len(names - disabled)} of {len(names)} tools active in this chat"
