"""The handler of POST /v1/sample: images as JSON, as one PNG, or as JSON lines with previews."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vitreous.apps.server.child import DecodeSettings
from vitreous.apps.server.requests import (
    Upload,
    describe_model_version,
    format_endpoint,
    get_request_context,
    read_parameters,
    read_parts,
)
from vitreous.apps.server.responses import Refusal, json_response, shorten_text
from vitreous.apps.server.sample_request import SampleLimits, SampleRequest, parse_sample_request
from vitreous.apps.server.service import RequestInfo, Service
from vitreous.data.modalities.images import ImagePreprocess

if TYPE_CHECKING:
    from vitreous.apps.server.sample_job import SampleJob

NDJSON_TYPE, PNG_TYPE, JSON_TYPE = "application/x-ndjson", "image/png", "application/json"
LAST_LINE_SECONDS = 0.5  # seconds before the deadline at which the stream ends, to leave time for an error line


async def handle_sample(request: Request) -> Response:
    """Generate images. Raises Refusal: 404 if the model is not generative, and the refusals of `read_sample_request`
    and `read_inpainting_images`."""
    service, info = get_request_context(request)
    read_parameters(request)
    served = service.served
    if served.generator is None or served.sampling is None:
        raise Refusal(
            404, "not_available", "this is not a generative model", f"use {format_endpoint(served.predictor.card)}"
        )
    sample_request, uploads = await read_sample_request(request, served.sampling)
    inpainting = await read_inpainting_images(service, info, uploads) if uploads else None
    response_type = choose_response_type(request.headers.get("accept", ""))
    from vitreous.apps.server.sample_job import SampleJob

    job = SampleJob(served, served.generator, sample_request, service.batcher.report_progress, inpainting=inpainting)
    if response_type == NDJSON_TYPE:
        return SampleStream(service, info, job)
    with service.admit_images(info, sample_request.cost(served.sampling)):
        info.images = sample_request.count
        try:
            work = job.compute_grid if response_type == PNG_TYPE else job.compute_document
            result = await service.batcher.compute(work, job.set_deadline(info.deadline), info.deadline, alone=True)
        finally:
            job.stop.set()
    if isinstance(result, bytes):
        return Response(result, headers={"cache-control": "no-store"}, media_type=PNG_TYPE)
    return json_response({"request_id": info.id, "model": describe_model_version(served), **result})


async def read_sample_request(request: Request, limits: SampleLimits) -> tuple[SampleRequest, dict[str, Upload]]:
    """Read a request, and its uploads `image` and `mask` for inpainting, if any. The body is a JSON object, or a form
    with these two files and the object in the field `settings`.

    Raises Refusal: those of `parse_sample_request`, 400 for any other form, 422 if the model does not support
    inpainting.
    """
    media_type = request.headers.get("content-type", "")
    if media_type.split(";", 1)[0].strip().lower() != "multipart/form-data":
        return parse_sample_request(media_type, await request.body(), limits), {}
    if not limits.inpaint:
        raise Refusal(
            422,
            "bad_parameter",
            "a latent diffusion model does not support inpainting",
            "send only settings, as application/json",
        )
    form_fields = await read_parts(request)
    names, hint = [name for name, _ in form_fields], "send image and mask as files, and settings as a JSON field"
    if unknown := next((name for name in names if name not in ("image", "mask", "settings")), None):
        raise Refusal(400, "bad_request", f"unknown field {shorten_text(unknown)}", hint)
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise Refusal(400, "bad_request", f"duplicate field {duplicate}", "send it once")
    uploads = {name: value for name, value in form_fields if isinstance(value, Upload) and name != "settings"}
    if uploads.keys() != {"image", "mask"}:
        raise Refusal(400, "bad_request", "inpainting needs an image and a mask", hint)
    settings = dict(form_fields).get("settings", "{}")
    body = settings.encode() if isinstance(settings, str) else bytes(settings.content)
    return parse_sample_request(JSON_TYPE, body, limits), uploads


async def read_inpainting_images(
    service: Service, info: RequestInfo, uploads: dict[str, Upload]
) -> tuple[np.ndarray, np.ndarray]:
    """Decode an image and its mask at the model's image size, (C, H, W) and (1, H, W) uint8. Raises Refusal, 422, if
    they cannot be decoded, or have different sizes."""
    preprocess = service.served.predictor.card.preprocess
    grey = DecodeSettings(ImagePreprocess(preprocess.image, 1), False, service.limits.pixels)
    with service.admit_images(info, len(uploads)):
        decode, settings = service.decoders.decode, service.served.decode_settings
        image, size = await decode(uploads["image"].content, settings, with_size=True)
        mask, mask_size = await decode(uploads["mask"].content, grey, with_size=True)
    if size != mask_size:
        sizes = [" x ".join(map(str, size_pair)) for size_pair in (size, mask_size)]
        raise Refusal(
            422, "bad_parameter", f"image {sizes[0]} and mask {sizes[1]} differ in size", "use the same size for both"
        )
    return image, mask


def choose_response_type(accept: str) -> str:
    """Return the first supported media type of an Accept header; JSON if none is supported."""
    media_types = [entry.split(";", 1)[0].strip().lower() for entry in accept.split(",")]
    return next(
        (media_type for media_type in media_types if media_type in (NDJSON_TYPE, PNG_TYPE, JSON_TYPE)), JSON_TYPE
    )


class SampleStream(Response):
    """A response of JSON lines: `preview` during generation, then `result`, or `error` on failure.

    If a client reads slowly, it misses previews and delays only its own connection.
    """

    def __init__(self, service: Service, info: RequestInfo, job: SampleJob) -> None:
        super().__init__(media_type=NDJSON_TYPE)
        self.service, self.info, self.job, self.started = service, info, job, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI). Exceptions before the first line are raised, Refusal and TimeoutError among them;
        later, they are sent as an `error` line."""
        service, info, job = self.service, self.info, self.job
        deadline = info.deadline - min(LAST_LINE_SECONDS, (info.deadline - info.start_time) / 4)
        assert job.served.sampling is not None
        with service.admit_images(info, job.request.cost(job.served.sampling)):
            info.images = job.request.count
            computation = service.batcher.compute(
                job.compute_document, job.set_deadline(deadline, previews=True), deadline, alone=True
            )
            work = asyncio.ensure_future(computation)
            work.add_done_callback(lambda _: job.preview_event.set())
            try:
                async with asyncio.timeout_at(deadline):
                    while not work.done():
                        await job.preview_event.wait()
                        job.preview_event.clear()
                        if not work.done():
                            await self.write(send, job.preview)
                    result = {"event": "result", "request_id": info.id, "model": describe_model_version(job.served)}
                    last_line = result | work.result()
            except Exception as error:
                if not self.started:
                    raise
                refusal = service.to_refusal(error, info)
                last_line = {"event": "error", "error": refusal.to_json(info.id)}
            finally:
                job.stop.set()
                work.cancel()
        await self.write(send, last_line)
        await send({"type": "http.response.body", "body": b""})

    async def write(self, send: Send, document: dict[str, Any] | None) -> None:
        """Send a document as a JSON line; start the response before the first line."""
        if not self.started:
            headers = [(b"content-type", NDJSON_TYPE.encode()), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self.started = True
        line = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        await send({"type": "http.response.body", "body": line.encode() + b"\n", "more_body": True})
