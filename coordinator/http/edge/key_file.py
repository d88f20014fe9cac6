"""The file of API keys: one key a line, with a name before it and options behind it. Pure.

# comments and empty lines are left out
0123456789abcdef0123
alice: 0123456789abcdef4567
batch: 0123456789abcdef89ab share=2 streams=8 queue=100 priority=low models=small,sql tokens-per-minute=60000
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote, unquote

import msgspec
from msgspec import Meta

from relayline.coordinator.sessions.tenants import SHARE_MAX, Level, Tenant
from relayline.wire.common.errors import UsageError

KEY_CHARS_MIN, KEY_CHARS_MAX = 16, 512  # shorter can be guessed
KEYS_MAX = 10_000  # requests wait while they are read: half a second
STREAMS_MAX, QUEUE_MAX, TOKENS_PER_MINUTE_MAX = 65_536, 1_000_000, 1_000_000_000
MODELS_MAX = 256  # names of models that one key may use
NAME_CHARS_MAX = 1_024  # of a gateway's client
BEHALF_CHARS_MAX = 7_600  # of the header with a key's options: a pipeline reads 8,190 of a line
FILE_BYTES_MAX = KEYS_MAX * (KEY_CHARS_MAX + 128)
_NO_MODEL = frozenset({""})  # is the name of none; an empty set would be all
_CHOICES = {"priority": "must be high, normal or low", "prefixes": "must be shared or own"}
_LINE = "line "  # how a key without a name is called, before the number
_BY_LINE = re.compile(rf"{_LINE}\d+(/|\Z)")
_NAMED = re.compile(r"(?:(?P<name>.*?):)?\s*(?P<key>[^\s:]+)(?P<options>(?:\s+[A-Za-z][\w-]*=\S*)*)")


class Options(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """What a key may have besides its name; nothing of it has to be said."""

    share: Annotated[int, Meta(ge=1, le=SHARE_MAX)] = 1
    streams: Annotated[int, Meta(ge=1, le=STREAMS_MAX)] | None = None
    queue: Annotated[int, Meta(ge=0, le=QUEUE_MAX)] | None = None
    priority: Literal["high", "normal", "low"] = "normal"
    models: str = ""
    tokens_per_minute: Annotated[int, Meta(ge=1, le=TOKENS_PER_MINUTE_MAX)] | None = None
    gateway: Literal["yes", "no"] = "no"
    steers: Literal["yes", "no"] = "yes"
    prefixes: Literal["shared", "own"] = "shared"


class _Behalf(Options, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=False):
    """The client of a gateway, with the options that its key has there; newer gateways may say more."""

    name: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    lasting: Annotated[str, Meta(max_length=NAME_CHARS_MAX)] = ""
    """`ApiKey.lasting_name` where it is not the name."""


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, of which only the SHA-256 is kept, so that no dump or log of ours can show it."""

    digest: bytes
    tenant: Tenant
    """Who shows it, with what its options say of lanes and models."""
    options: Options
    lasting: str = ""
    """Of a gateway's client: its lasting name."""

    @property
    def name(self) -> str:
        """Its name in the file."""
        return self.tenant.name

    @property
    def lasting_name(self) -> str:
        """Its name in the file; of a key without one its SHA-256 in hex, because its line may be another's tomorrow."""
        return self.lasting or (self.digest.hex() if self.is_unnamed else self.name)

    @property
    def is_unnamed(self) -> bool:
        """Whether it is called by its line."""
        return _BY_LINE.match(self.name) is not None

    @property
    def behalf(self) -> str:
        """Who shows it, for a pipeline to which a gateway shows its own key: a header's text."""
        lasting = self.lasting_name if self.is_unnamed else ""
        said = msgspec.structs.asdict(self.options) | {"name": self.name[:NAME_CHARS_MAX], "lasting": lasting}
        return quote(msgspec.json.encode(_Behalf(**said)))

    def of_behalf(self, text: str) -> ApiKey:
        """Return the key of a gateway's client, from the text that the gateway made; this key where it is none.

        A client may use no model, and steer nothing, that this key may not; nor does it share this key's own prefixes
        with others.
        """
        try:
            said = msgspec.json.decode(unquote(text), type=_Behalf)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return self
        lasting = f"{self.lasting_name}/{said.lasting or said.name}"
        tenant = _tenant(f"{self.name}/{said.name}", said, lasting)
        if own := self.tenant.models:
            both = own & tenant.models if tenant.models else own
            tenant = dataclasses.replace(tenant, models=both or _NO_MODEL)
        tenant = dataclasses.replace(tenant, circle=tenant.circle or self.tenant.circle)
        steers = said.steers if self.options.steers == "yes" else "no"
        return ApiKey(self.digest, tenant, msgspec.structs.replace(said, steers=steers), lasting)


def first_key(text: str, *, of_gateway: bool = False) -> str:
    """Return the first key in a file's text, the first that is a gateway's if there is one; empty for none."""
    found = [
        match for line in text.splitlines() if not line.startswith("#") and (match := _NAMED.fullmatch(line.strip()))
    ]
    own = [match for match in found if of_gateway and "gateway=yes" in match["options"].split()]
    return (own or found)[0]["key"] if found else ""


def parse_keys(text: str, path: Path) -> dict[str, ApiKey]:
    """Return the keys by name: one `KEY` or `NAME: KEY` a line, with options behind it.

    A key without a name is called by its line. Raises UsageError; its message never holds a key.
    """
    found: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key = _key_of(line, number, f"{path}:{number}")
        if key.name in found:
            raise UsageError(f"{path}:{number}: another key has this name")
        found[key.name] = key
    if not found:
        raise UsageError(f"{path} holds no API key; write one per line")
    if len(found) > KEYS_MAX:
        raise UsageError(f"{path} holds more than {KEYS_MAX} API keys")
    return found


def _key_of(line: str, number: int, where: str) -> ApiKey:
    match = _NAMED.fullmatch(line)
    if match is None:
        raise UsageError(_misread(line, where))
    name, key = match["name"], match["key"]
    name = f"{_LINE}{number}" if name is None else name.strip()
    if not _is_key(key):
        raise UsageError(_no_key(where))
    if not name:
        raise UsageError(f"{where}: the name before the colon is empty")
    options = _options(match["options"].split(), where)
    digest = hashlib.sha256(key.encode()).digest()
    tenant = _tenant(name, options, name if match["name"] is not None else digest.hex())
    if len(tenant.models) > MODELS_MAX:
        raise UsageError(f"{where}: models: at most {MODELS_MAX} names")
    found = ApiKey(digest, tenant, options)
    if (n_chars := len(found.behalf)) > BEHALF_CHARS_MAX:
        raise UsageError(
            f"{where}: the name and its models are too long: {n_chars} characters as a gateway sends them, at most "
            f"{BEHALF_CHARS_MAX}"
        )
    return found


def _tenant(name: str, options: Options, lasting_name: str) -> Tenant:
    models = frozenset(filter(None, map(str.strip, options.models.split(","))))
    level, circle = Level[options.priority.upper()], lasting_name if options.prefixes == "own" else ""
    return Tenant(name, options.share, options.streams, options.queue, level, models, circle)


def _is_key(key: str) -> bool:
    return KEY_CHARS_MIN <= len(key) <= KEY_CHARS_MAX and all("!" <= char <= "~" for char in key)


def _no_key(where: str) -> str:
    return (
        f"{where}: a key is {KEY_CHARS_MIN} to {KEY_CHARS_MAX} printable ASCII characters, no spaces; "
        "make one with: openssl rand -hex 24"
    )


def _misread(line: str, where: str) -> str:
    """Return what is wrong with a line that is neither a key nor a name with one."""
    first, *more = (line.partition(":")[2] or line).split() or [""]
    if not _is_key(first) or not more:
        return _no_key(where)
    return f"{where}: behind the key stand options only, as in share=2; there are {_known()}"


@functools.cache  # msgspec evaluates all annotations at each look
def _known() -> str:
    return ", ".join(field.encode_name for field in msgspec.structs.fields(Options))


def _options(words: list[str], where: str) -> Options:
    said: dict[str, str] = {}
    for option, _, value in (word.partition("=") for word in words):
        if option in said or not value:
            raise UsageError(f"{where}: an option is said twice, or has no value")
        said[option] = value
    if not said.keys() <= set(_known().split(", ")):  # which is not said: it may be a part of a key
        raise UsageError(f"{where}: an option that there is not; there are {_known()}")
    try:
        return msgspec.convert(said, Options, strict=False)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at `$.")
        option = at.rstrip("`")
        problem = _CHOICES.get(option, problem[:1].lower() + problem[1:])
        raise UsageError(f"{where}: {option}: {problem}") from None
