"""Reading mcp.json in the formats of other clients, and errors for damaged files."""

import json
from pathlib import Path

import pytest

from app.mcp.config import MAX_BYTES, HTTPServer, InvalidMCPConfig, StdioServer, read_mcp_config


def write(path: Path, content: object) -> Path:
    file = path / "mcp.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_missing_file_describes_no_servers(tmp_path: Path) -> None:
    assert read_mcp_config(tmp_path / "mcp.json", {}) == []


def test_servers_of_both_formats_and_both_transports_are_read(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {
            "mcpServers": {
                "files": {
                    "command": "npx",
                    "args": ["-y", "${env:PACKAGE}"],
                    "env": {"KEY": "a${SECRET}b"},
                    "cwd": "/x",
                },
                "off": {"command": "false", "disabled": True, "autoApprove": ["unknown keys are ignored"]},
            },
            "servers": {"web": {"type": "http", "url": "https://a.example/mcp", "headers": {"X": "${SECRET}"}}},
            "inputs": [],
        },
    )
    web, files, off = read_mcp_config(file, {"PACKAGE": "server", "SECRET": "s"})
    assert web.transport == HTTPServer("https://a.example/mcp", {"X": "s"})
    assert files.transport == StdioServer("npx", ("-y", "server"), {"KEY": "asb"}, "/x")
    assert (files.is_enabled, off.is_enabled) == (True, False)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"mcpServers": []}',
        '{"mcpServers": {"a": {}}}',
        '{"mcpServers": {"a": {"url": "file:///etc/passwd"}}}',
        '{"mcpServers": {"a": {"command": 1}}}',
        " " * (MAX_BYTES + 1),
    ],
)
def test_invalid_file_is_an_error_that_names_it(content: str, tmp_path: Path) -> None:
    file = write(tmp_path, content)
    with pytest.raises(InvalidMCPConfig, match=r"mcp\.json") as raised:
        read_mcp_config(file, {})
    assert raised.value.remedy
