"""``uccl-ep export``: the live counters of this host's Buffers as metrics of Prometheus, all engines in one process.

A scrape reads the Buffers at that moment (:mod:`uccl_ep_serving.stats`); between scrapes nothing runs, and the engines
neither import this nor listen on a port.
"""

from __future__ import annotations

import functools
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from uccl_ep_serving.cli.readings import MISSING, Counters, read_all, waiting, ways
from uccl_ep_serving.data_plane.standing import STATES
from uccl_ep_serving.stats import Reading, Served

__all__ = ["METRICS", "Buffers", "Metric", "app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
#: By the values of a metric's own labels.
Samples = Iterator[tuple[tuple[str, ...], "float | Distribution"]]

_FRESH_SECONDS = 1.0
#: Ends of the first and the last bucket of a histogram, in seconds.
_SHORTEST, _LONGEST = 4e-6, 40.0
#: Who connects and says nothing is let go after so long.
_IDLE_SECONDS = 10.0
#: Which Buffer a sample is of: the process as this one counts it, the Buffer's number in it, and its EP rank.
_LABELS = ("pid", "buffer", "rank")


class Distribution(NamedTuple):
    """Of a histogram.

    Attributes:
        buckets: upper end of each in seconds, as text, with how many were below it; the last is ``+Inf``.
        total: seconds of all, None where nobody knows.
    """

    buckets: list[tuple[str, int]]
    total: float | None


class Metric(NamedTuple):
    """One metric.

    Attributes:
        name: with the unit; counters get ``_total`` behind it.
        family: what kind it is.
        meaning: in words.
        labels: besides those of the Buffer.
        samples: of what a Buffer answered.
    """

    name: str
    family: type[Family]
    meaning: str
    labels: tuple[str, ...]
    samples: Callable[[Counters], Samples]

    @property
    def scraped(self) -> str:
        """Its name in an answer."""
        return f"{self.name}_total" if self.family is CounterMetricFamily else self.name


def _one(name: str, divisor: float = 1) -> Callable[[Counters], Samples]:
    """The value ``name`` of the answer, where it is there."""

    def samples(counters: Counters) -> Samples:
        if name in counters:
            yield (), counters[name] / divisor

    return samples


def _by_operation(name: str, divisor: float = 1) -> Callable[[Counters], Samples]:
    def samples(counters: Counters) -> Samples:
        for operation, one in counters.get("ops", {}).items():
            yield (operation,), one[name] / divisor

    return samples


def _latest(counters: Counters) -> Samples:
    for operation, one in counters.get("ops", {}).items():
        if one["count"]:
            for quantile, name in (("0.5", "p50_us"), ("0.99", "p99_us")):
                yield (operation, quantile), one[name] / 1e6


def _distribution(counts: Sequence[int], first_end: float, total: float | None) -> Distribution:
    """Of buckets whose ends double from ``first_end`` on, in seconds, and of which the last has no end; those that are
    shorter than anything of interest are one."""
    below = list(itertools.accumulate(counts))
    ends = [first_end * 2**index for index in range(len(counts))]
    named = [
        (f"{end:.9g}", count) for end, count in zip(ends[:-1], below, strict=False) if _SHORTEST <= end <= _LONGEST
    ]
    return Distribution([*named, ("+Inf", below[-1])], total)


def _durations(counters: Counters) -> Samples:
    for operation, one in counters["ops"].items():
        if counts := counters.get("durations", {}).get(operation):
            yield (operation,), _distribution(counts, 1e-6, one["total_us"] / 1e6)


def _writes(counters: Counters) -> Samples:
    if latency := counters.get("latency"):
        yield (), _distribution([sum(column) for column in zip(*latency.values(), strict=False)], 2e-9, None)


def _reconnections(counters: Counters) -> Samples:
    for connection, name in (("control", "control_reconnections"), ("proxy", "reconnections")):
        if name in counters:
            yield (connection,), counters[name]


def _peers(counters: Counters) -> Samples:
    for way, count in ways(counters).items():
        yield (way,), count
    for state in MISSING:
        yield (state,), len(counters.get(state, ()))


def _state(counters: Counters) -> Samples:
    for state in STATES:
        yield (state,), state == counters["state"]


def _waited(counters: Counters) -> Samples:
    for peer, count in counters["waits"]["by_peer"].items():
        yield (peer,), count


def _waiting(counters: Counters) -> Samples:
    if "ring_depth" in counters:
        yield (), waiting(counters)


METRICS = (
    Metric(
        "uccl_ep_state", GaugeMetricFamily, "1 for how the rank stands, 0 for what else there is", ("state",), _state
    ),
    Metric("uccl_ep_epoch", GaugeMetricFamily, "how often the ranks have rebuilt their windows", (), _one("epoch")),
    Metric("uccl_ep_opened_timestamp_seconds", GaugeMetricFamily, "when the Buffer was opened", (), _one("opened")),
    Metric(
        "uccl_ep_peers", GaugeMetricFamily, "other ranks, by the way to them; masked and lost ones", ("way",), _peers
    ),
    Metric(
        "uccl_ep_operations",
        CounterMetricFamily,
        "dispatches and combines; what captured graphs replay is not counted",
        ("operation",),
        _by_operation("count"),
    ),
    Metric(
        "uccl_ep_operation_tokens", CounterMetricFamily, "tokens given to them", ("operation",), _by_operation("tokens")
    ),
    Metric(
        "uccl_ep_operation_rows",
        CounterMetricFamily,
        "rows sent to other ranks, 0 where the host does not know them",
        ("operation",),
        _by_operation("rows"),
    ),
    Metric(
        "uccl_ep_operation_seconds",
        HistogramMetricFamily,
        "time inside the calls, on a GPU the host's part alone; long where a rank waits for another",
        ("operation",),
        _durations,
    ),
    Metric(
        "uccl_ep_operation_latest_seconds",
        GaugeMetricFamily,
        "median and 99th percentile of the latest 8,192 calls",
        ("operation", "quantile"),
        _latest,
    ),
    Metric(
        "uccl_ep_wait_seconds",
        GaugeMetricFamily,
        "how long the operation under way has waited for others, 0 while none does",
        (),
        lambda counters: _one("seconds")(counters["waits"]),
    ),
    Metric(
        "uccl_ep_wait_samples",
        CounterMetricFamily,
        "looks at for whom the rank waits",
        (),
        lambda counters: _one("samples")(counters["waits"]),
    ),
    Metric(
        "uccl_ep_waiting_samples",
        CounterMetricFamily,
        "those in which it waited for this peer: divided by the looks, the part of the time that a straggler costs",
        ("peer",),
        _waited,
    ),
    Metric("uccl_ep_proxy_sent_bytes", CounterMetricFamily, "bytes that proxies have sent", (), _one("bytes_sent")),
    Metric(
        "uccl_ep_proxy_received_bytes",
        CounterMetricFamily,
        "bytes that have come through proxies",
        (),
        _one("bytes_received"),
    ),
    Metric(
        "uccl_ep_proxy_messages_sent", CounterMetricFamily, "messages that proxies have sent", (), _one("messages_sent")
    ),
    Metric(
        "uccl_ep_proxy_messages_received", CounterMetricFamily, "messages that have come", (), _one("messages_received")
    ),
    Metric("uccl_ep_proxy_writes", CounterMetricFamily, "writes that proxies have posted", (), _one("writes")),
    Metric(
        "uccl_ep_proxy_held_back", CounterMetricFamily, "writes that came before an earlier one", (), _one("held_back")
    ),
    Metric("uccl_ep_proxy_duplicates", CounterMetricFamily, "writes that came twice", (), _one("duplicates")),
    Metric(
        "uccl_ep_proxy_busy_posts", CounterMetricFamily, "posts that the transport refused as busy", (), _one("retries")
    ),
    Metric(
        "uccl_ep_proxy_write_seconds",
        HistogramMetricFamily,
        "from posting a write to its completion, one at a time; without sum and count",
        (),
        _writes,
    ),
    Metric(
        "uccl_ep_reconnections",
        CounterMetricFamily,
        "TCP connections that broke and were made again, between the hosts of the ranks and of their proxies",
        ("connection",),
        _reconnections,
    ),
    Metric("uccl_ep_proxy_sleeps", CounterMetricFamily, "times that an idle proxy slept", (), _one("sleeps")),
    Metric("uccl_ep_proxy_waiting_commands", GaugeMetricFamily, "commands in rings and queues", (), _waiting),
    Metric(
        "uccl_ep_proxy_in_flight_bytes",
        GaugeMetricFamily,
        "bytes posted and not completed",
        (),
        _one("bytes_in_flight"),
    ),
)


class Buffers(Collector):
    """Reads the Buffers of this host at each scrape."""

    def __init__(self) -> None:
        #: Of those that have answered: one that does not is still known by its rank.
        self._ranks: dict[Served, str] = {}
        self._latest: Mapping[Served, Reading] = {}
        self._due = 0.0

    def collect(self) -> Iterator[Family]:
        """What every Buffer says now."""
        found = self._readings()
        up = GaugeMetricFamily("uccl_ep_up", "1 for a Buffer that answers, 0 for one that does not", labels=_LABELS)
        named: list[tuple[list[str], Counters]] = []
        for one, reading in found.items():
            labels = self._labels(one, reading)
            up.add_metric(labels, reading.counters is not None)
            if reading.counters is not None:
                named.append((labels, reading.counters))
        self._ranks = {one: rank for one, rank in self._ranks.items() if one in found}
        yield up
        for metric in METRICS:
            told = metric.family(metric.name, metric.meaning, labels=(*_LABELS, *metric.labels))
            for labels, counters in named:
                for values, value in metric.samples(counters):
                    told.add_metric([*labels, *values], *(value if isinstance(value, Distribution) else (value,)))
            yield told

    def _readings(self) -> Mapping[Served, Reading]:
        """Those of the last second, where there are any: who scrapes costs the engines no more than that."""
        if time.monotonic() >= self._due:
            self._latest, self._due = read_all(), time.monotonic() + _FRESH_SECONDS
        return self._latest

    def _labels(self, one: Served, reading: Reading) -> list[str]:
        if reading.counters is not None:
            self._ranks[one] = str(reading.counters["rank"])
        return [str(reading.pid or one.pid), str(one.number), self._ranks.get(one, "")]


def _report(others: Callable[[Any, Any], None], request: Any, client: Any) -> None:
    """What a request has failed with. A client that has gone is no fault of this process."""
    if not isinstance(sys.exception(), ConnectionError):
        others(request, client)


@app.command()
def command(
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port to serve on; 0: any, which is printed.")] = 9464,
    address: Annotated[str, typer.Option(help="Of this host, where to listen.")] = "0.0.0.0",
) -> None:
    """Serve the live counters of this host's open Buffers to Prometheus, until Ctrl-C or SIGTERM.

    One process for all engines and ranks of the host, of the same user or as root, in their network namespace.
    """
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before there are threads, so that they are waited for
    registry = CollectorRegistry()
    registry.register(Buffers())
    try:
        server, _ = start_http_server(port, address, registry)
    except OSError as error:
        typer.echo(f"export: cannot listen on {address}:{port}: {error.strerror or error}", err=True)
        raise typer.Exit(1) from None
    server.RequestHandlerClass.timeout = _IDLE_SECONDS  # type: ignore[attr-defined]
    server.handle_error = functools.partial(_report, server.handle_error)  # type: ignore[method-assign]
    typer.echo(f"http://{address}:{server.server_port}/metrics")
    signal.sigwait(ends)
    server.shutdown()
