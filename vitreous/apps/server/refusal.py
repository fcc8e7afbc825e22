"""Why a request is not answered. Free of Starlette, so that it can be imported without the extra `serve`."""

from __future__ import annotations

from collections.abc import Mapping

from vitreous.errors import VitreousError, printable


class Refusal(VitreousError):
    """An HTTP status and a stable code for programs; `retry`: seconds for the header Retry-After, 0 for none."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        hint: str = "",
        retry: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.status, self.name, self.retry, self.headers = status, code, retry, dict(headers or {})

    def describe(self, request_id: str) -> dict[str, str]:
        """The refusal as JSON has it, under the key `error`."""
        return {"code": self.name, "message": self.message, "hint": self.hint, "request_id": request_id}


def shorten(text: str) -> str:
    """A client's words as one printable line of at most 60 characters."""
    return printable(text if len(text) <= 60 else text[:57] + "...")
