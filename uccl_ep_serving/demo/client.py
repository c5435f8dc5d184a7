"""A client of the OpenAI-compatible endpoints, with the standard library alone: completions, chat, streaming."""

from __future__ import annotations

import contextlib
import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from uccl_ep_serving.demo.server import ServerFailed
from uccl_ep_serving.demo.sglang_launch import MODEL

__all__ = ["Answer", "Client", "Difference", "compare"]

_SECONDS = 120.0
#: Nats: how far apart two positions are taken to be whose likely tokens have none in common.
NOTHING_SHARED = 100.0
_TOP = 5  # most that the completions endpoint of the OpenAI interface gives


@dataclass(frozen=True)
class Answer:
    """One greedy completion.

    Attributes:
        text: what was generated.
        tokens: generated tokens as text, in order.
        logprobs: natural logarithm of the probability of each.
        top: for each position the most likely tokens and their logprobs.
    """

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    top: tuple[dict[str, float], ...]


@dataclass(frozen=True)
class Difference:
    """How two lists of answers to the same prompts differ.

    Attributes:
        equal: answers whose text is the same.
        answers: answers compared.
        positions: token positions compared: those whose preceding tokens agree.
        largest: largest difference of a logprob at those positions, over the tokens that both list; a position at
            which they have none in common counts as :data:`NOTHING_SHARED`.
        mean: mean of these differences.
    """

    equal: int
    answers: int
    positions: int
    largest: float
    mean: float


def _delta(one: float | None, other: float | None) -> float:
    """Between two logprobs: infinite where one is missing or is no finite number and the other is."""
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return 0.0 if one == other else math.inf
    return abs(one - other)


def compare(one: Sequence[Answer], other: Sequence[Answer]) -> Difference:
    """Compare answers position by position as long as the tokens before a position agree.

    After the first differing token the two models continue different texts, so later logprobs say nothing.
    """
    deltas: list[float] = []
    positions = 0
    for left, right in zip(one, other, strict=True):
        for index, (a, b) in enumerate(zip(left.top, right.top, strict=False)):
            positions += 1
            deltas += [_delta(a[token], b[token]) for token in a.keys() & b.keys()] or [NOTHING_SHARED]
            if left.tokens[index] != right.tokens[index]:
                break
    return Difference(
        equal=sum(left.text == right.text for left, right in zip(one, other, strict=True)),
        answers=len(one),
        positions=positions,
        largest=max(deltas, default=0.0),
        mean=sum(deltas) / max(1, len(deltas)),
    )


@contextlib.contextmanager
def _whole(endpoint: str) -> Iterator[None]:
    """Raises ServerFailed for what is asked and read inside where the server refuses, breaks off, or says no JSON."""
    try:
        try:
            yield
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            raise ServerFailed(f"/v1/{endpoint} answered {error.code}: {detail}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise ServerFailed(f"/v1/{endpoint} broke off: {error}") from error


class Client:
    """Requests to one server, all greedy (temperature 0).

    Args:
        url: base address, for example ``http://127.0.0.1:30000``.
        model: name of the model that it serves.
        seconds: that an answer may take. The first one of a server may wait for kernels to be compiled.

    Every method raises :class:`~uccl_ep_serving.demo.server.ServerFailed` when the server refuses or breaks off.
    """

    def __init__(self, url: str, model: str = MODEL, seconds: float = _SECONDS) -> None:
        self._url = url
        self._model = model
        self._seconds = seconds

    def complete(self, prompt: str, max_tokens: int) -> Answer:
        """``/v1/completions`` with logprobs."""
        choice = self._post(
            "completions", {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": _TOP}
        )["choices"][0]
        given = choice["logprobs"]
        return Answer(
            text=choice["text"],
            tokens=tuple(given["tokens"]),
            logprobs=tuple(given["token_logprobs"]),
            top=tuple(given["top_logprobs"]),
        )

    def complete_all(self, prompts: Sequence[str], max_tokens: int, at_once: int) -> list[Answer]:
        """:meth:`complete` for every prompt, ``at_once`` of them in flight."""
        pool = ThreadPoolExecutor(at_once)
        try:
            return list(pool.map(lambda prompt: self.complete(prompt, max_tokens), prompts))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after an error or Ctrl-C, nobody waits for the others

    def chat(self, text: str, max_tokens: int) -> str:
        """``/v1/chat/completions`` with one user message; returns the answer."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}
        return str(self._post("chat/completions", body)["choices"][0]["message"]["content"])

    def stream(self, text: str, max_tokens: int) -> Iterator[str]:
        """The same as :meth:`chat`, piece by piece as server-sent events bring it."""
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        with _whole("chat/completions"), self._open("chat/completions", body) as response:
            for line in response:
                event = line.decode().strip().removeprefix("data: ")
                if event == "[DONE]":
                    return
                if not event:
                    continue
                for choice in json.loads(event).get("choices", []):
                    piece = choice["delta"].get("content")
                    if piece:
                        yield piece
            raise ServerFailed("/v1/chat/completions broke off: its stream has no [DONE]")

    def _post(self, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        with _whole(endpoint), self._open(endpoint, body) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    def _open(self, endpoint: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self._url}/v1/{endpoint}",
            json.dumps({"model": self._model, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=self._seconds)
