# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""What the server says: one HTTP request that can be given up, and the one real generation.

Standard library only. Times are seconds.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .health_text import scrub

BODY_LIMIT = 1 << 20

# --------------------------------------------------------------------------------------------------------------- HTTP


@dataclass(frozen=True)
class HttpAnswer:
    """Status 0: no answer, and `error` is one of refused, timeout, broken."""

    status: int = 0
    error: str = ""
    body: str = ""
    seconds: float = 0.0
    detail: str = ""

    def text(self) -> str:
        """For people: `503`, `refused`, `timeout`."""
        return str(self.status) if self.status else self.error


class PendingAnswer(Protocol):
    """A request under way."""

    def wait(self, seconds: float) -> HttpAnswer | None:
        """Wait at most so long for the answer."""

    def abort(self) -> None:
        """Give the request up."""


class HttpRequest:
    """One HTTP request in a thread, so that the unit can be watched meanwhile. Proxies of the environment are not asked."""

    def __init__(self, host: str, port: int, method: str, path: str, body: Any = None, timeout: float = 25.0) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout)
        self._call = (method, path, None if body is None else json.dumps(body))
        self._answer: HttpAnswer | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"{method} {path}")
        self._thread.start()

    def _work(self) -> None:
        began = time.monotonic()
        method, path, body = self._call
        try:
            headers = {"Connection": "close", "User-Agent": "gpuserve-health-gate"}
            if body is not None:
                headers["Content-Type"] = "application/json"
            self._connection.request(method, path, body=body, headers=headers)
            response = self._connection.getresponse()
            text = response.read(BODY_LIMIT).decode("utf-8", "replace")
            answer = HttpAnswer(response.status, "", text, time.monotonic() - began)
        except ConnectionRefusedError:
            answer = HttpAnswer(error="refused", seconds=time.monotonic() - began)
        except TimeoutError:
            answer = HttpAnswer(error="timeout", seconds=time.monotonic() - began)
        # AttributeError, ValueError: abort() closed the connection under the reader.
        except (OSError, http.client.HTTPException, AttributeError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
            answer = HttpAnswer(error="broken", seconds=time.monotonic() - began, detail=detail)
        finally:
            self._connection.close()
        self._answer = answer
        self._done.set()

    def wait(self, seconds: float) -> HttpAnswer | None:
        """Wait at most so long for the answer."""
        self._done.wait(max(0.0, seconds))
        return self._answer

    def abort(self) -> None:
        """Give the request up: close the connection under it."""
        held = self._connection.sock
        if held is not None:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)


Requester = Callable[[str, int, str, str, Any, float], PendingAnswer]


@dataclass(frozen=True)
class Generation:
    """The one real answer."""

    ok: bool
    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    error: str = ""

    def public(self) -> dict[str, Any]:
        """What the module returns."""
        return {"text": self.text, "tokens": self.tokens, "seconds": round(self.seconds, 2)}


def judge_generation(answer: HttpAnswer) -> Generation:
    """A chat completion counts when there is text in it; a reasoning model may have put all of it into its thoughts."""
    if answer.status == 0:
        what = {"timeout": "no answer within", "refused": "connection refused after"}.get(
            answer.error, f"the connection broke ({answer.detail or answer.error}) after"
        )
        return Generation(False, seconds=answer.seconds, error=f"{what} {answer.seconds:.1f} s")
    if answer.status != 200:
        excerpt = scrub(" ".join(answer.body.split())[:300])
        return Generation(False, seconds=answer.seconds, error=f"HTTP {answer.status}: {excerpt}".rstrip(": "))
    try:
        data = json.loads(answer.body)
        message = data["choices"][0]["message"]
        pieces = [message.get(key) for key in ("content", "reasoning_content", "reasoning")]
        text = next((piece for piece in pieces if isinstance(piece, str) and piece.strip()), "")
        usage = data.get("usage") or {}
        tokens = int(usage.get("completion_tokens") or 0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        excerpt = scrub(" ".join(answer.body.split())[:300])
        return Generation(False, seconds=answer.seconds, error=f"HTTP 200, but no chat completion: {excerpt}")
    if not text:
        return Generation(False, "", tokens, answer.seconds, "HTTP 200, but the answer has no text")
    return Generation(True, text, tokens, answer.seconds)


def generation_body(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """Sampling on purpose: greedy requests leave the sampling kernels uncompiled for the first user to wait for."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": max_tokens,
        "stream": False,
    }
