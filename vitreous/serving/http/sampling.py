"""The handler of POST /v1/sample: images as JSON, as one PNG, or as lines with previews while they are made."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vitreous.serving.http.refusal import Refusal
from vitreous.serving.http.requests import address_of, context, model_name, read_parameters
from vitreous.serving.http.responses import json_response
from vitreous.serving.http.sample_request import parse_sample_request
from vitreous.serving.http.service import RequestInfo, Service

if TYPE_CHECKING:
    from vitreous.serving.http.sample_job import SampleJob

LINES, PNG, JSON = "application/x-ndjson", "image/png", "application/json"
LAST = 0.5  # seconds before the deadline after which lines end, so that a last one can say so


async def sample(request: Request) -> Response:
    """Images of a model that makes them. Raises Refusal: 404 for a model that makes none, and those of
    `parse_sample_request`."""
    service, info = context(request)
    read_parameters(request)
    served = service.served
    if served.generator is None or served.sampling is None:
        raise Refusal(404, "not_available", "this model makes no images", address_of(served.predictor.card))
    asked = parse_sample_request(request.headers.get("content-type", ""), await request.body(), served.sampling)
    kind = answer_type(request.headers.get("accept", ""))
    from vitreous.serving.http.sample_job import SampleJob

    job = SampleJob(served, served.generator, asked, service.batcher.beat)
    if kind == LINES:
        return SampleLines(service, info, job)
    with service.room(info, asked.cost(served.sampling)):
        info.images = asked.count
        try:
            work = job.grid if kind == PNG else job.document
            result = await service.batcher.ask(work, job.begin(info.deadline), info.deadline, alone=True)
        finally:
            job.stop.set()
    if isinstance(result, bytes):
        return Response(result, headers={"cache-control": "no-store"}, media_type=PNG)
    return json_response({"request_id": info.id, "model": model_name(served), **result})


def answer_type(accept: str) -> str:
    """The first type of an Accept header that there is, JSON if none is."""
    kinds = [part.split(";", 1)[0].strip().lower() for part in accept.split(",")]
    return next((kind for kind in kinds if kind in (LINES, PNG, JSON)), JSON)


class SampleLines(Response):
    """A JSON document a line: `preview` while images are made, then `result`, or `error` where there is none.

    A client that reads slowly misses previews; nothing waits for it but its own connection.
    """

    def __init__(self, service: Service, info: RequestInfo, job: SampleJob) -> None:
        super().__init__(media_type=LINES)
        self.service, self.info, self.job, self.started = service, info, job, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The response (ASGI). Raises Refusal and TimeoutError before its first line; later they are the last."""
        service, info, job = self.service, self.info, self.job
        deadline = info.deadline - min(LAST, (info.deadline - info.began) / 4)
        assert job.served.sampling is not None
        with service.room(info, job.asked.cost(job.served.sampling)):
            info.images = job.asked.count
            ask = service.batcher.ask(job.document, job.begin(deadline, previews=True), deadline, alone=True)
            work = asyncio.ensure_future(ask)
            work.add_done_callback(lambda _: job.changed.set())
            try:
                async with asyncio.timeout_at(deadline):
                    while not work.done():
                        await job.changed.wait()
                        job.changed.clear()
                        if not work.done():
                            await self.write(send, job.preview)
                    result = {"event": "result", "request_id": info.id, "model": model_name(job.served)}
                    last = result | work.result()
            except Exception as error:
                if not self.started:
                    raise
                refusal = service.refusal_of(error, info)
                last = {"event": "error", "error": refusal.describe(info.id)}
            finally:
                job.stop.set()
                work.cancel()
        await self.write(send, last)
        await send({"type": "http.response.body", "body": b""})

    async def write(self, send: Send, document: dict[str, Any] | None) -> None:
        """Send a document as a line."""
        if not self.started:
            headers = [(b"content-type", LINES.encode()), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self.started = True
        line = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        await send({"type": "http.response.body", "body": line.encode() + b"\n", "more_body": True})
