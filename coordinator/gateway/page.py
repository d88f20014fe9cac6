"""The page of a gateway at `/`: its pipelines, each with a link to its own page. Nothing but what `/health` says; a
script (coordinator/http/page/gateway.js) adds models and streams from `/v1/pipeline`, with the key that this may need.

The page of a pipeline works below /pipelines/NAME/ as it does at that one's own address.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from urllib.parse import quote

from relayline.coordinator.gateway.router import Backend, Health
from relayline.wire.common.phase import Phase

PREFIX = "/pipelines"  # before a name and any route: that pipeline alone is asked
# Files that need no key, as at the pipelines themselves: all data comes from routes that do.
OPEN = re.compile(rf"{PREFIX}/[a-zA-Z0-9_-]+/(page/[a-z]+\.[a-z]+)?")
REFRESH_S = 5
_DOTS = {Health.READY.value: "ok", Phase.SLEEPING.value: "idle", Health.DEAD.value: "bad"}  # others: "warn"


def gateway_page(backends: Iterable[Backend]) -> bytes:
    """Return the page, UTF-8."""
    rows = "\n".join(map(_row, backends))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<noscript><meta http-equiv="refresh" content="{REFRESH_S}"></noscript>
<title>relayline gateway</title>
<link rel="icon" href="page/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="page/style.css">
<script type="module" src="page/gateway.js"></script>
</head>
<body>
<a class="skip" href="#main">Skip to content</a>
<div class="top">
<header class="bar"><h1 class="mark"><img src="page/icon.svg" alt="" width="22" height="22"> relayline gateway</h1>
<button id="theme" class="quiet end" type="button">◐ Auto</button></header>
<div id="notice" class="notice err" role="status" hidden></div>
</div>
<main id="main" tabindex="-1">
<section>
<div class="head"><h2>Pipelines</h2>
<p id="sum">The model that a request names chooses among them: <code>/v1/models</code>.</p></div>
<div class="panel scroll" tabindex="0" role="region" aria-label="Table of pipelines"><table>
<thead><tr><th scope="col">Pipeline</th><th scope="col">State</th></tr></thead>
<tbody>
{rows}
</tbody>
</table></div>
</section>
</main>
</body>
</html>
""".encode()


def _row(backend: Backend) -> str:
    state = backend.state
    link = f'<a href="{PREFIX[1:]}/{quote(backend.name, safe="")}/">{html.escape(backend.name)}</a>'
    dot = f'<span class="dot {_DOTS.get(state, "warn")}" aria-hidden="true"></span>'
    return f"<tr><td>{link}</td><td>{dot}{html.escape(state)}</td></tr>"
