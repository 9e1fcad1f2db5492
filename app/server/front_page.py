"""The page at `/` for browsers: what runs here, and how programs reach it."""

from html import escape

from starlette.responses import HTMLResponse

from app.server.served_model import ServedModel

# Nothing is fetched, and nothing runs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Inglenook</title>
<meta name="viewport" content="width=device-width">
<style>body {{ max-width: 40rem; margin: 3rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif;
color-scheme: light dark }} code {{ font-size: .95em }}</style></head>
<body><h1>Inglenook is running</h1>
<p>It serves <code>{model}</code> with a context of {context:,} tokens.
To chat, run <code>ingle</code> in a terminal.</p>
<ul>
<li>Base URL for OpenAI's clients: <code>{base}/v1</code></li>
<li>For clients of Ollama, Anthropic, llama.cpp, and LM Studio: <code>{base}</code></li>
<li><a href="/v1/models">Models</a>, <a href="/openapi.json">API description</a>, <a href="/health">health</a>,
<a href="/metrics">metrics</a></li>
</ul></body></html>
"""


def front_page(model: ServedModel, base: str) -> HTMLResponse:
    """The page of a server that is reached at the URL `base`, without a slash at its end."""
    page = _PAGE.format(model=escape(model.name), context=model.context_length, base=escape(base))
    return HTMLResponse(page, headers={"content-security-policy": _POLICY})
