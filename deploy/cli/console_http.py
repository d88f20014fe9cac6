"""Shared by the commands that query a running coordinator: its address, and one JSON answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Collection
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from relayline.deploy.cli.options import Line, Name
from relayline.wire.common.errors import ContextLengthError, StartError, UsageError
from relayline.wire.common.texts import printable_values, system_reason

if TYPE_CHECKING:
    import ssl

    import aiohttp  # a third of a second, which `up`, `logs` and `down` need not wait for

TIMEOUT_S = 15.0
GATEWAY_PATH = "/v1/pipeline"  # whose answer says whether it is one
EVENT_WAIT_S = 900.0  # between two events of a stream: a stage may be lost meanwhile, or a queue be long
DEFAULT_URL = "http://127.0.0.1:8080"
Command = Callable[..., Any]
KEY_VARIABLE = "RELAYLINE_API_KEY"
TOO_LONG = (ContextLengthError.label, "exceed_context_size_error")  # of OpenAI's API, and of llama-server
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")  # OpenSSL's reasons, by its version, where no TLS came
KEY_STATUSES = (401, 403)  # no key, a wrong one, or one that may not do this

ARGUMENT = "pipeline_here"  # the parameter of `name_argument`
_FOUND = f"{__name__}.found"  # in a click context: the pipeline of this machine that is looked at


def chosen_url(ctx: click.Context, _: click.Parameter, url: str | None) -> str:
    """Return the coordinator's address: given, or of the pipeline that runs here.

    Raises UsageError, or StartError for a pipeline that has no address yet.
    """
    name, argument = ctx.params.get("pipeline"), ctx.params.get(ARGUMENT)
    if sum(map(bool, (url, name, argument))) > 1:
        raise UsageError(f"give only one of {'NAME, ' if argument else ''}--url and --pipeline")
    name = name or argument
    if url:
        return url
    from relayline.deploy.launch.control import find

    found = find(name, None, by_url=True)
    if found is None or not found.is_running:
        if name:
            raise UsageError(f"{name} does not run here; `relayline status` shows what does")
        return DEFAULT_URL
    if not found.state.url:
        from relayline.deploy.launch.state import still_starting

        raise StartError(still_starting(found.state.name))
    ctx.meta[_FOUND] = found
    return found.state.url


def shown_url(url: str) -> str:
    """Return how people are shown the chosen address: that of a pipeline of this machine as `status` shows it."""
    ctx = click.get_current_context(silent=True)
    found = None if ctx is None else ctx.meta.get(_FOUND)
    return url if found is None else str(found.state.shown_url)


def _chosen_key(ctx: click.Context, _: click.Parameter, key: str) -> str:
    """Return the key: given, or one of the pipeline of this machine that is looked at."""
    if key or _FOUND not in ctx.meta:
        return key
    from relayline.deploy.launch.control import key_of

    return key_of(ctx.meta[_FOUND])


def names_here(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the pipelines of this machine, for a shell that completes a name."""
    from relayline.deploy.launch.control import launched

    names = (each.state.name for each in launched(None) if each.state.name.startswith(incomplete))
    return list(dict.fromkeys(names))


def name_argument(command: Command) -> Command:
    """Add NAME, for --pipeline NAME. It goes with `url_option`."""
    return click.argument(
        ARGUMENT, type=Name(), required=False, metavar="[NAME]", is_eager=True, shell_complete=names_here
    )(command)


def url_option(command: Command) -> Command:
    """Add --url and --pipeline; without both it is the pipeline that runs on this machine."""
    command = click.option(
        "--url", type=Line("url"), callback=chosen_url, envvar="RELAYLINE_URL",
        help="The coordinator, or GATEWAY/pipelines/NAME [default: of the pipeline that runs here, else "
        f"{DEFAULT_URL}].",
    )(command)  # fmt: skip
    return click.option(
        "--pipeline",
        type=Line("name"),
        is_eager=True,
        shell_complete=names_here,
        help="Name of a pipeline that runs here, not --url.",
    )(command)


key_option = click.option(
    "--api-key", type=Line("key"), default="", envvar=KEY_VARIABLE, show_envvar=True, callback=_chosen_key,
    help="Key, where the server demands one.",
)  # fmt: skip


def base_url(url: str) -> str:
    """Return the coordinator's address without a path. Raises UsageError."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        is_usable = False
    if not is_usable:
        with_scheme = re.fullmatch(r"([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}", url)
        raise UsageError(f"{url!r} is not a URL such as {f'http://{url}' if with_scheme else 'http://127.0.0.1:8080'}")
    return url


def client_tls(url: str) -> ssl.SSLContext | bool:
    """Return the TLS for a URL: of a pipeline that runs here its certificate alone, else True for the system's CAs."""
    from relayline.deploy.launch.trust import trust_of

    return trust_of(url) or True


def key_headers(api_key: str) -> dict[str, str]:
    """Return the headers with a key, none without one. Raises UsageError for a text that cannot be a key."""
    api_key = api_key.strip()
    if not all("!" <= char <= "~" for char in api_key):
        raise UsageError("the API key has characters other than printable ASCII; no valid key has those")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def parsed(body: bytes) -> Any:
    """Return the JSON of an answer with every text safe for a terminal, None if it is not JSON."""
    try:
        return printable_values(json.loads(body))
    except (ValueError, RecursionError):
        return None


def refusal(url: str, status: int, found: Any) -> str:
    """Return the error message in the JSON of an answer of 400 or above, in one line, and the remedy where another key
    is needed.
    """
    detail = found.get("error") if isinstance(found, dict) else None
    text = detail.get("message") if isinstance(detail, dict) else None
    if status in KEY_STATUSES:
        detail_text = f" ({text})" if text else ""
        return f"{url} answered {status}{detail_text}; give it the right API key with --api-key or in {KEY_VARIABLE}"
    return str(text or f"{url} answered {status}")


def is_too_long(found: Any) -> bool:
    """Return whether the JSON of an error says that a request is longer than the context."""
    detail = found.get("error") if isinstance(found, dict) else None
    return isinstance(detail, dict) and (detail.get("code") in TOO_LONG or detail.get("type") in TOO_LONG)


def unanswered(url: str, error: Exception) -> StartError:
    """Return the error of a server that gives no answer, with the cause that aiohttp or the system names."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        from relayline.deploy.launch.trust import refused

        return StartError(f"{url}: {refused(error.certificate_error)}")
    if isinstance(error, aiohttp.ClientConnectorSSLError) and getattr(error.os_error, "reason", "") in NO_TLS:
        return StartError(f"{url} does not answer: its port speaks no TLS; give http{url.removeprefix('https')}")
    return StartError(
        f"{url} does not answer ({why_silent(error)}); `relayline status` shows what runs here; if it runs elsewhere, "
        f"give its URL{_url_form()}"
    )


def _url_form() -> str:
    """Return how the running command takes a URL: most by a flag, `bench` as its argument."""
    context = click.get_current_context(silent=True)
    has_flag = context is not None and any("--url" in parameter.opts for parameter in context.command.params)
    return ": --url http://HOST:8080" if has_flag else ", such as http://HOST:8080"


def why_silent(error: Exception) -> str:
    """Return why a server gives no answer, in the words of the system or of aiohttp."""
    import aiohttp

    if type(error) is aiohttp.ClientResponseError:  # whose text has the bytes that came
        return "what listens there speaks no HTTP"
    return system_reason(error) or str(error) or type(error).__name__


class Coordinator:
    """Questions to one coordinator. An async context manager."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s` for each answer."""
        self.url, self._timeout_s = base_url(url), timeout_s
        self._headers = key_headers(api_key)
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Coordinator:
        import aiohttp

        timeout, connector = (
            aiohttp.ClientTimeout(total=self._timeout_s),
            aiohttp.TCPConnector(ssl=client_tls(self.url)),
        )
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str, wanted: Collection[str] = ()) -> dict[str, Any]:
        """Return the JSON object at `path`.

        Raises StartError with one line when nothing answers there, or answers with an error or with something else:
        no JSON, no object, or one that lacks a key of `wanted`. Raises UsageError where a gateway answers that needs to
        know which of its pipelines is meant.
        """
        return await self._ask("GET", path, None, wanted)

    async def put(self, path: str, body: dict[str, Any], wanted: Collection[str] = ()) -> dict[str, Any]:
        """Put a JSON object to `path` and return the one that is answered. Raises as `get`."""
        return await self._ask("PUT", path, body, wanted)

    async def post(self, path: str, body: dict[str, Any], wanted: Collection[str] = ()) -> dict[str, Any]:
        """Post a JSON object to `path` and return the one that is answered. Raises as `get`."""
        return await self._ask("POST", path, body, wanted)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Post a JSON object to `path` and yield the server-sent events that answer it, as they come.

        Their texts are as the server sent them, and not safe for a terminal. Raises ContextLengthError for a request
        that is longer than the context, and StartError where nothing answers, where the answer is another error,
        reports one or breaks off.
        """
        import aiohttp

        url, n_events = f"{self.url}{path}", 0
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=EVENT_WAIT_S)
        try:
            async with self._session.post(url, json=body, timeout=timeout) as response:
                if response.status >= 400:
                    found = parsed(await response.read())
                    error = ContextLengthError if is_too_long(found) else StartError
                    raise error(refusal(url, response.status, found))
                async for line in response.content:
                    data = line.strip().removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == b"[DONE]":
                        continue
                    event = json.loads(data)
                    if event.get("error"):
                        raise StartError(refusal(url, 500, parsed(data)))
                    n_events += 1
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if n_events:
                raise StartError(f"the answer broke off: {str(error) or type(error).__name__}") from error
            raise unanswered(self.url, error) from error
        except (ValueError, AttributeError) as error:  # of JSON, of a line that is too long
            raise StartError(f"{url} does not answer with events in JSON") from error
        if not n_events:
            raise StartError(f"{url} does not answer with events in JSON")

    async def _ask(self, method: str, path: str, body_sent: Any, wanted: Collection[str]) -> dict[str, Any]:
        import aiohttp

        try:
            async with self._session.request(method, f"{self.url}{path}", json=body_sent) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unanswered(self.url, error) from error
        found = parsed(body)
        if response.status == HTTPStatus.BAD_REQUEST and path != GATEWAY_PATH:
            await self._check_no_gateway()
        if response.status in KEY_STATUSES or (response.status >= 400 and found is not None):
            raise StartError(refusal(f"{self.url}{path}", response.status, found))
        if not isinstance(found, dict) or not found.keys() >= set(wanted):
            raise StartError(f"{self.url}{path} is not served by a relayline coordinator")
        return found

    async def _check_no_gateway(self) -> None:
        """Raise UsageError with what to type if this address is that of several pipelines."""
        try:
            found = await self.get(GATEWAY_PATH, ("kind", "pipelines"))
        except StartError:
            return
        if found["kind"] == "gateway":
            names = ", ".join(each["name"] for each in found["pipelines"])
            raise UsageError(
                f"{self.url} is a gateway; name one of its pipelines ({names}): --url {self.url}/pipelines/NAME"
            )


def fetch(url: str, path: str, api_key: str = "", wanted: Collection[str] = ()) -> dict[str, Any]:
    """Return the JSON object at one path of a coordinator. Raises like Coordinator.get."""

    async def once() -> dict[str, Any]:
        async with Coordinator(url, api_key) as coordinator:
            return await coordinator.get(path, wanted)

    return asyncio.run(once())
