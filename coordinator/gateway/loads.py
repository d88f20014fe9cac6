"""Loads and unloads models because clients ask for that, and for no answer: wakes pipelines, and puts them to sleep.

A load needs a place among those that may be awake, and waits for it as a request would. Its client does not: it looks
at the model's status.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Collection, Sequence

from multidict import CIMultiDict

from relayline.coordinator.gateway.bounds import LOAD_ANSWER_S
from relayline.coordinator.gateway.forward import Forwarder, Refusal
from relayline.coordinator.gateway.router import Backend
from relayline.coordinator.http.edge.steering import SLEEP_PATHS
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.tasks import cancel_all

log = logging.getLogger("relayline.gateway")

_SLEEP, _WAKE, _ = SLEEP_PATHS


class Loads:
    """The loads of one gateway: at most one for each pipeline. Event loop only."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder, self._links = forwarder, forwarder.links
        self._loading: dict[Backend, asyncio.Task[Refusal]] = {}
        self.is_closed = False
        """Whether nothing is to be loaded, or watched, any more."""

    async def look(self, backends: Collection[Backend]) -> None:
        """Ask pipelines how they are: what the gateway knows of them may be a second old."""
        links = self._links.links
        await asyncio.gather(*(self._links.ask(links[each]) for each in backends if each in links))

    async def load(self, backend: Backend, headers: CIMultiDict[str]) -> Refusal | None:
        """Begin to wake a pipeline; `headers` say for whom. Returns its refusal, if that comes soon.

        Raises NotReadyError where the gateway finds soon that it cannot wake.
        """
        backend.is_loading, backend.is_unloading, backend.has_failed = True, False, False
        task = self._loading[backend] = asyncio.create_task(self._load(backend, headers))
        task.add_done_callback(functools.partial(self._ended, backend))
        await asyncio.wait({task}, timeout=LOAD_ANSWER_S)
        if not task.done() or task.cancelled():  # cancelled: by one who unloads it
            return None
        answer = task.result()
        return answer if answer.status >= 400 else None

    async def _load(self, backend: Backend, headers: CIMultiDict[str]) -> Refusal:
        problem = ""
        try:
            answer = await self._forwarder.told(self._links.links[backend], _WAKE, headers)
            problem = f"it answered {answer.status}" if answer.status >= 400 else ""
            return answer
        except RelaylineError as error:
            problem = error.message
            raise
        finally:
            if problem:
                log.warning("pipeline %s was to be loaded and is not: %s", backend.name, problem)
                backend.has_failed = True
            await self.look([backend])

    def _ended(self, backend: Backend, task: asyncio.Task[Refusal]) -> None:
        backend.is_loading = False
        del self._loading[backend]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, RelaylineError):  # a bug of ours, of which nobody else may hear
            log.error("pipeline %s was not loaded", backend.name, exc_info=error)

    async def unload(self, backends: Sequence[Backend], headers: CIMultiDict[str]) -> Refusal | None:
        """Let pipelines sleep as soon as no request runs there; `headers` say for whom. Returns the first refusal.

        Those that sleep already are left alone. Raises NotReadyError for one that does not answer.
        """
        loading = [each for each in backends if each in self._loading]
        await self._give_up(loading)
        await self.look(backends)
        links = self._links.links
        awake = [each for each in backends if each in links and (each in loading or not each.is_asleep)]
        told = (self._forwarder.told(links[each], _SLEEP, headers) for each in awake)
        answers = await asyncio.gather(*told, return_exceptions=True)
        for backend, answer in zip(awake, answers, strict=True):
            backend.is_unloading = isinstance(answer, Refusal) and answer.status < 400
        await self.look(awake)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return next((each for each in answers if isinstance(each, Refusal) and each.status >= 400), None)

    async def _give_up(self, backends: Collection[Backend]) -> None:
        await cancel_all([self._loading[each] for each in backends])

    async def close(self) -> None:
        """Give up all loads."""
        self.is_closed = True
        await self._give_up(list(self._loading))
