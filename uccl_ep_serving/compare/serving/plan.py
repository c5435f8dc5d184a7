"""What is compared, of servers: the line that starts one, its backends, and what each server is asked."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from uccl_ep_serving.compare.directory import FEWEST_STARTS
from uccl_ep_serving.compare.plan import distinct
from uccl_ep_serving.errors import ConfigError

__all__ = ["PORT", "Extra", "Load", "ServingPlan", "value_of"]

#: Stands for the port in a line: that of the URL, a free one without.
PORT = "{port}"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
#: A line with one of these is printed, kept and logged, by the engines too.
_SECRET = re.compile(r"(--\S*|\b\w*)(api[-_]?key|hf[-_]?token|secret|password)\w*(?=[ =]|$)", re.IGNORECASE)
#: Nothing can be asked for at an address with one of these.
_NOT_IN_URL = re.compile(r"[\x00-\x20\x7f]")


def value_of(line: Sequence[str], *options: str) -> str:
    """The value of the first of ``options`` that ``line`` has, "" without any."""
    for index, word in enumerate(line):
        for option in options:
            if word == option and index + 1 < len(line):
                return line[index + 1]
            if word.startswith(f"{option}="):
                return word.partition("=")[2]
    return ""


def _check_url(url: str) -> None:
    """Raise ConfigError unless a server can answer at ``url``; without a port it is that of the scheme."""
    try:
        parts = urlsplit(url)
        known = bool(parts.scheme in ("http", "https") and parts.hostname and parts.port != 0)
        known = known and "@" not in parts.netloc and not _NOT_IN_URL.search(url)
    except ValueError:
        known = False
    if not known:
        raise ConfigError(
            f"compare: --url {url} is no address of a server. Next step: write http://HOST:PORT, or https, with a port "
            "of 1 to 65535"
        )


def _check_port(line: Sequence[str]) -> None:
    """Raise ConfigError when the port that ``line`` names is none that a server can listen on."""
    port = value_of(line, "--port")
    if not port or any(PORT in word for word in line):
        return
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(
            f"compare: --port {port} is no port. Next step: name one of 1 to 65535, or {PORT} for one that is free"
        )


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine's client sends in each round.

    Attributes:
        requests: how many. at_once: so many in flight, without a rate.
        rate: requests per second, however many are in flight; 0 for as fast as ``at_once`` lets them.
        input_tokens, output_tokens: of each request; ids are drawn at random, another draw in each round.
        client: more arguments of the client.
    """

    requests: int = 256
    at_once: int = 64
    rate: float = 0.0
    input_tokens: int = 512
    output_tokens: int = 128
    client: tuple[str, ...] = ()

    @property
    def arrivals(self) -> dict[str, Any]:
        """How requests come, in the options of both engines' clients. Beside a rate they count the time to the first
        token from when a place was free: with a cap, a server that falls behind would look as fast as one that does
        not."""
        return {"request-rate": self.rate} if self.rate else {"request-rate": "inf", "max-concurrency": self.at_once}

    def __post_init__(self) -> None:
        for name in ("requests", "at_once", "input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"compare: {name} is {getattr(self, name)}: at least 1")
        if self.output_tokens < 2:
            raise ConfigError("compare: the time per token after the first needs at least 2 output tokens")
        if self.rate < 0:
            raise ConfigError(f"compare: rate is {self.rate}: requests per second, or 0")


@dataclass(frozen=True, slots=True)
class Extra:
    """What one backend gets beside the common line, written ``NAME=VALUE ... --option ...``."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Extra:
        """As a shell reads it: leading words with "=" are variables. Raises ConfigError."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"compare: {text!r}: {error}") from None
        count = next((index for index, word in enumerate(words) if not _VARIABLE.match(word)), len(words))
        pairs = (word.partition("=") for word in words[:count])
        return cls({name: value for name, _, value in pairs}, tuple(words[count:]))


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """One comparison of servers.

    Attributes:
        engine: "sglang" or "vllm".
        line: the command that starts a server; empty for the demo's tiny model on two CPU ranks.
        backends: by the engine's names, the first beside every other one. A name given twice is started twice: the
            second, NAME#2, shows what the method says of equals, or differs by what ``extras`` gives it.
        extras: by name in ``backends``, as :class:`Extra` parses it.
        starts: how often every server is started anew. rounds: loads of each server after it was warmed up.
        load: of one round.
        bound: most that logprobs of greedy answers may differ on average, where the texts are not the same.
        url: where the server answers, when that is not this host.
        tokenizer: name or path, where the line does not show which model it serves.
        seed: of the requests.
        profiled_steps: steps that the engine's profiler records after the rounds of the first start, 0 for none.
    """

    engine: str
    line: tuple[str, ...]
    backends: tuple[str, ...]
    extras: Mapping[str, str] = field(default_factory=dict)
    starts: int = FEWEST_STARTS
    rounds: int = 3
    load: Load = field(default_factory=Load)
    bound: float = 0.05
    url: str = ""
    tokenizer: str = ""
    seed: int = 0
    profiled_steps: int = 32

    def __post_init__(self) -> None:
        if len(self.backends) < 2:
            raise ConfigError("compare: name at least two backends, the one in question first")
        if self.starts < FEWEST_STARTS:
            raise ConfigError(f"compare: {self.starts} starts say nothing of how starts differ: {FEWEST_STARTS} do")
        if self.rounds < 1:
            raise ConfigError(f"compare: {self.rounds} rounds measure nothing")
        if self.profiled_steps < 0:
            raise ConfigError(f"compare: {self.profiled_steps} steps cannot be profiled: 0 for none")
        if not self.bound > 0:
            raise ConfigError(f"compare: the bound on logprobs is {self.bound}: above 0")
        if self.url:
            _check_url(self.url)
        else:
            _check_port(self.line)
        words = " ".join([*self.line, *self.extras.values()])
        if secret := _SECRET.search(words):
            raise ConfigError(
                f"compare: {secret[0]} would stand in the results and in the engine's logs. Next step: leave it out"
                " (the servers need be reached by this command only)"
            )
        object.__setattr__(self, "backends", distinct(self.backends))
        unknown = sorted(set(self.extras) - set(self.backends))
        if unknown:
            raise ConfigError(f"compare: options for {', '.join(unknown)}, but compared: {', '.join(self.backends)}")
        for text in self.extras.values():
            Extra.parse(text)

    def extra(self, name: str) -> Extra:
        """What the server ``name`` gets beside the common line."""
        return Extra.parse(self.extras.get(name, ""))

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @property
    def digest(self) -> str:
        """Equal for equal plans."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:16]
