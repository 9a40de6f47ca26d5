"""A request that is refused or has failed: its status, and the body OpenAI's clients read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
}


class Refusal(Exception):
    """An answer other than success; `field` names what of the request is meant."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's clients read it."""
        kind = TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """Return the whole answer."""
        return json_response(self.body(), self.status, self.headers)


def bad_field(field: str, rule: str) -> Refusal:
    """Refuse a request because of one field."""
    return Refusal(400, f"{field}: {rule}", field=field)


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return JSON in ASCII; what is not a number (NaN, ∞) never gets out."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(text, status, dict(headers or {}), media_type="application/json")
