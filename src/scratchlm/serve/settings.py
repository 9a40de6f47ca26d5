"""What a server is told when it starts: where it listens, whom it lets in, and its limits."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from scratchlm.errors import ScratchLMError

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class ServeSettings:
    """Addresses, access and limits of a server."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    name: str | None = None  # of the model; None: that of its directory
    chat_format: str | None = None  # None: the model's own template, or the one it has markers for

    api_key: str | None = None
    hosts: tuple[str, ...] = ()  # further names by which the server may be called
    origins: tuple[str, ...] = ()  # web pages from elsewhere that may call it

    max_queue: int = 256  # rows that may wait; one more is answered 429
    max_choices: int = 128  # prompts × n of one request
    max_stops: int = 16
    max_stop_length: int = 256  # characters
    max_logprobs: int = 20
    max_biases: int = 1024
    max_messages: int = 1024

    max_body: int = 8 * MIB
    max_bodies: int = 128 * MIB  # of all requests together, what each has beyond 64 KiB
    max_json_depth: int = 16
    max_headers: int = 32 * KIB
    max_connections: int = 900
    header_seconds: float = 10.0  # to receive all headers of a request
    body_seconds: float = 30.0  # to receive its body
    write_seconds: float = 60.0  # for what is ready to have been read by the client
    # Longer than clients keep theirs: one that reads slowly sends its next request late, and must
    # not meet a closed connection. Where there are too many, idle ones are closed first.
    keep_alive_seconds: float = 75.0
    drain_seconds: float = 30.0  # after SIGTERM, for requests that run
    log_requests: bool = False  # paths and statuses; never what was said

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key:
            raise ScratchLMError("the API key must not be empty")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ScratchLMError("the API key must be of printable ASCII characters")
        if not self.host:
            raise ScratchLMError("the host must not be empty")
        if not is_loopback(self.host) and self.api_key is None:
            raise ScratchLMError(
                f"listening on {self.host} lets others in: it needs --api-key "
                "(or SCRATCHLM_API_KEY); 127.0.0.1 does not"
            )
        for name in ("max_queue", "max_choices", "max_body", "max_bodies", "max_connections"):
            if getattr(self, name) < 1:
                raise ScratchLMError(f"{name} must be at least 1; got {getattr(self, name)}")
        if "*" in self.origins:
            raise ScratchLMError("origins must be named one by one; got *")
        for origin in self.origins:
            if not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ScratchLMError(
                    f"an origin is http:// or https:// and a host, without a path; got {origin!r}"
                )
        for name in self.hosts:
            if not re.fullmatch(r"[\w.-]+", name) and not is_address(name.strip("[]")):
                raise ScratchLMError(f"a host is a name or an address, no port; got {name!r}")


def is_loopback(host: str) -> bool:
    """Say whether an address is that of this machine alone."""
    if host == "localhost":
        return True
    return is_address(host.strip("[]")) and ipaddress.ip_address(host.strip("[]")).is_loopback


def is_address(host: str) -> bool:
    """Say whether a host is named by its number."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
