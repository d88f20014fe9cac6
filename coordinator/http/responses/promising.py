"""Writes down what a background response is to answer, before its client is told that it will be."""

from __future__ import annotations

from aiohttp import web

from relayline.coordinator.http.conversations.store import Turn
from relayline.coordinator.http.edge.clients import CLIENT, PAYER, Payer
from relayline.coordinator.http.edge.record import RECORD
from relayline.coordinator.http.replies.job import Job
from relayline.coordinator.http.replies.service import Service
from relayline.coordinator.http.replies.spending import Spending
from relayline.coordinator.http.responses.asking import AnswerOptions
from relayline.coordinator.http.responses.background import Background
from relayline.coordinator.http.responses.dialect import ResponsesDialect
from relayline.coordinator.http.responses.orders import Order, Sent
from relayline.coordinator.http.responses.running import Running
from relayline.coordinator.http.responses.waiting import AGAIN


async def promised_job(
    background: Background,
    service: Service,
    request: web.Request,
    job: Job,
    dialect: ResponsesDialect,
    options: AnswerOptions,
    sent: Sent,
    turn: Turn | None,
) -> Running:
    """Return a job as `Background.begin` takes it, written down where responses are kept. Raises the refusal."""
    again = request.get(AGAIN)
    running = Running(request.get(CLIENT, ""), job, request[RECORD], dialect, options, turn, again)
    if background.keeper is None or again is not None:
        return running
    background.check_room(running.owner)
    Spending(request, service.observer).check(job.n_prompt_tokens)  # before the disk has work with it
    payer = request.get(PAYER, Payer(""))
    order = Order(
        id=running.id,
        owner=running.owner,
        payer=payer.name,
        behalf=payer.behalf,
        created=job.header.created,
        sent=sent,
        model_id=service.model_id,
        n_vocab=service.tokenizer.n_vocab,
        queued=dialect.state("queued"),
        input_items=options.input_items,
        previous_id=options.previous_response_id,
        is_stream=job.plan.stream,
        conversation_id=options.conversation_id,
    )
    await background.keeper.promise(order)
    return running
