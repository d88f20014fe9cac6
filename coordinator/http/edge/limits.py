"""The limits of one HTTP request, and of the time for which a client may keep the server waiting."""

from __future__ import annotations

import dataclasses

from relayline.wire.model_files.adapter_texts import AdapterText, read_adapters
from relayline.wire.model_files.recommended import NOTHING, Recommended
from relayline.wire.settings.media_hosts import read_media_hosts
from relayline.wire.settings.table import ServingSettings


@dataclasses.dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of the HTTP side. Every field has a default that suits one pipeline on a small network."""

    body_bytes_max: int = 16 * 1024 * 1024  # a million token ids written as JSON fit twice
    choices_per_prompt_max: int = 16  # the ceiling of `n`
    choices_max: int = 128  # prompts times `n` of one request
    stops_max: int = 64  # stop strings of one request; OpenAI allows 4, llama-server any number
    stop_chars_max: int = 256  # length of one stop string; each token's text is compared with every beginning of it
    prediction_chars_max: int = 4 * 1024 * 1024  # of it, as much is tokenised as a stream may hold
    backlog_events_max: int = 256  # tokens read from the pipeline and not yet written, per request
    ping_interval_s: float = 15.0  # an SSE comment after this long without a token, so that proxies keep the connection
    write_timeout_s: float = 30.0  # a reader that takes nothing for this long loses its request and frees its lanes
    head_timeout_s: float = 15.0  # for a request's headers, from its first byte or from a connection's start
    head_bytes_max: int = 64 * 1024  # of a request's line and headers together
    idle_timeout_s: float = 75.0  # between two requests; more than the 60 s after which load balancers close theirs
    body_stall_s: float = 15.0  # without a byte of a body that is being read
    body_grace_s: float = 20.0  # for a body, on top of its time at the slowest rate
    body_rate_min: int = 8 * 1024  # bytes per second of a body, the slowest
    bodies_bytes_max: int = 64 * 1024 * 1024  # of all bodies that have been read and not been worked on yet
    body_free_bytes: int = 64 * 1024  # of each body are not counted there: ordinary requests always find room
    linger_s: float = 2.0  # a refused client may continue sending for this long, unread, so that it gets its answer
    linger_bytes_max: int = 16 * 1024 * 1024
    close_timeout_s: float = 10.0  # for bytes written as a connection closes; a client that reads none is cut off
    connections_max: int = 4_096  # fewer where the system allows fewer open files
    connections_per_address_max: int = 512  # 0: no bound; none for loopback, where everybody behind a proxy comes from
    pooling: str = "auto"  # of hidden rows to an embedding: a name of sampler_fields.POOLINGS, or the model's
    strict_max_tokens: bool = False  # refuse a max_tokens that the context has no room for, instead of giving the room
    reasoning_budget: int = -1  # tokens of each block of thoughts, for requests that name none; -1: any number
    reasoning_budget_message: str = ""  # what thoughts end with that are longer
    model_aliases: tuple[str, ...] = ()  # further names of the model
    adapters: tuple[str, ...] = ()  # names of LoRA adapters, by which requests choose one; the first is choice 1
    lora: tuple[AdapterText, ...] = ()  # all LoRA adapters, those without names too
    media_hosts: tuple[str, ...] = ()  # from which images and audio may be fetched, as `--media-hosts` has them
    any_model_name: bool = False  # answer to any model name, for clients with fixed names
    recommended: tuple[tuple[str, int | float], ...] = ()  # sampling options of requests that do not name them

    def adapter_of(self, model: str) -> int:
        """Return the choice of LoRA adapters that a model's name means."""
        return 1 + self.adapters.index(model) if model in self.adapters else 0


def limits_of(serving: ServingSettings, recommended: Recommended = NOTHING) -> HttpLimits:
    """Return the limits of a coordinator: every client that may queue may also be connected.

    `recommended`: by its model.
    """
    usual = HttpLimits()
    return dataclasses.replace(
        usual,
        connections_max=usual.connections_max + serving.queue,
        connections_per_address_max=serving.connections_per_address,
        pooling=serving.pooling,
        strict_max_tokens=serving.strict_max_tokens,
        reasoning_budget=serving.reasoning_budget,
        reasoning_budget_message=serving.reasoning_budget_message.replace("\\n", "\n"),
        model_aliases=tuple(filter(None, map(str.strip, serving.served_model_name.split(",")))),
        adapters=serving.adapter_names,
        lora=read_adapters(serving.lora) if serving.lora else (),
        media_hosts=read_media_hosts(serving.media_hosts) if serving.media_hosts else (),
        any_model_name=serving.any_model_name,
        recommended=recommended.options if serving.sampling_defaults == "model" else (),
    )
