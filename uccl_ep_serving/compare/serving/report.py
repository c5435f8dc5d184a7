"""A comparison of servers for people: sentences, tables, a picture."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uccl_ep_serving.compare.page import Page, Rows, sentence, verdict_rows, write_page
from uccl_ep_serving.compare.plot import Bars, draw_bars
from uccl_ep_serving.compare.serving.engines import ENGINES
from uccl_ep_serving.compare.serving.results import COMPARED, OURS

__all__ = ["page_of", "write_reports"]

Result = Mapping[str, Any]

_TITLES = {
    "tokens_per_second": "output tokens/s",
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
}


def _load_line(result: Result) -> str:
    load = result["plan"]["load"]
    arrivals = f"{load['rate']:g} a second" if load["rate"] else f"{load['at_once']} at once"
    more = f", client with {shlex.join(load['client'])}" if load["client"] else ""
    return (
        f"{load['requests']} requests a round, {arrivals}, {load['input_tokens']} tokens in and "
        f"{load['output_tokens']} out (random ids){more}"
    )


def _workload(result: Result) -> str:
    plan = result["plan"]
    line = shlex.join(plan["line"]) if plan["line"] else "the demo's tiny model on two CPU ranks"
    return f"{ENGINES[plan['engine']].title}: {line}; {_load_line(result)}"


def _method(result: Result) -> str:
    plan = result["plan"]
    client = "sglang.benchmark.serving" if plan["engine"] == "sglang" else "vllm bench serve"
    return (
        f"{plan['starts']} starts of every server, {plan['rounds']} rounds each after one to warm up, by {client}; "
        f"intervals of {result['level']} % over starts and rounds"
    )


def _machine(result: Result) -> str:
    start = result["starts"][0]
    machine = start["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in {**start["versions"], **machine["versions"]}.items())
    return (
        f"client on {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}; commit "
        f"{machine['commit'] or 'unknown'}; {versions}; {machine['when']}"
    )


def _findings(result: Result) -> list[str]:
    return [sentence(_TITLES[one["figure"]], one) for one in result["verdicts"]] or ["Nothing could be compared."]


def _answer_sentences(result: Result) -> list[str]:
    return [
        f"{name} answers otherwise than {result['yardstick']} and has no figures: {text}."
        for name, text in result["wrong"].items()
    ] + [f"{name} was skipped: {text}" for name, text in result["skipped"].items()]


def _spread(one: Mapping[str, float], scale: float = 1.0) -> str:
    values = [scale * one[name] for name in ("median", "least", "most")]
    digits = 0 if values[0] >= 100 else 1 if values[0] >= 10 else 2
    median, least, most = (f"{value:,.{digits}f}" for value in values)
    return f"{median} ({least} - {most})"


def _figure_rows(result: Result) -> Rows:
    headings = [
        "server",
        "tokens/s",
        "TTFT ms",
        "p99",
        "TPOT ms",
        "p99",
        "all2all, % of time",
        "communication, % of steps",
    ]
    rows = []
    for name in result["measured"]:
        one = result["figures"][name]
        share = _spread(one["share"], 100) if "share" in one else "not counted"
        profile = result["starts"][0]["servers"][name]["profile"]
        steps = (
            f"{100 * profile['share']:.1f} ({profile['steps']} steps)" if isinstance(profile, dict) else "not profiled"
        )
        columns = ("tokens_per_second", "ttft_ms", "ttft_p99_ms", "tpot_ms", "tpot_p99_ms")
        rows.append([name, *(_spread(one[column]) for column in columns), share, steps])
    return headings, rows


def _server_rows(result: Result) -> Rows:
    rows = []
    for name in result["measured"]:
        one = result["starts"][0]["servers"][name]
        ready = [start["servers"][name]["seconds_to_ready"] for start in result["starts"]]
        answers = result["answers"].get(name)
        same = f"{answers['equal']} of {answers['answers']}" if answers else "the yardstick"
        difference = f"{answers['mean']:.1e}" if answers else ""
        path = ", ".join(one["transports"]) or ("not seen" if name.startswith(OURS) else "-")
        rows.append([name, path, same, difference, _seconds(ready)])
    return ["server", "path", "equal answers", "logprobs differ on average by", "ready after s"], rows


def _commands(result: Result) -> list[tuple[str, str]]:
    """By server, its command as a shell would take it."""
    found = []
    for name in result["measured"]:
        one = result["starts"][0]["servers"][name]
        variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in one["environment"].items())
        found.append((name, f"{variables} {shlex.join(one['command'])}".strip()))
    return found


def _profile_rows(result: Result) -> Rows:
    rows = []
    for name in result["measured"]:
        profile = result["starts"][0]["servers"][name]["profile"]
        if isinstance(profile, str):
            rows.append([name, profile, ""])
            continue
        rows += [[name, kernel, f"{100 * share:.1f}"] for kernel, share in profile["kernels"].items()]
    return ["server", "what communicates", "% of steps"], rows


def _seconds(values: list[float]) -> str:
    return f"{min(values):.0f} - {max(values):.0f}"


def page_of(result: Result) -> Page:
    """The report of ``result``."""
    verdicts = [{**one, "figure": _TITLES[one["figure"]]} for one in result["verdicts"]]
    return Page(
        command="uccl-ep compare-serving",
        workload=_workload(result),
        method=_method(result),
        machine=_machine(result),
        findings=_findings(result),
        told=result["caveats"] + _answer_sentences(result),
        tables=[
            ("Figures of a round: median (least - most)", *_figure_rows(result), 1),
            ("Verdicts", *verdict_rows(verdicts, "figure", "its figure / the other's"), 3),
            ("What the engine's profiler saw", *_profile_rows(result), 2),
            ("Servers", *_server_rows(result), 2),
        ],
        environment=result["starts"][0]["environment"],
        template="serving.html.j2",
        values={
            "bound": result["plan"]["bound"],
            "yardstick": result["yardstick"],
            "commands": _commands(result),
            "ours": OURS,
        },
    )


def write_reports(result: Result, directory: Path) -> list[Path]:
    """Write serving.json, serving.html and, where matplotlib is installed, serving.png and serving.svg.

    Returns:
        What was written, the page first.
    """
    bars = [
        Bars(
            f"{_TITLES[figure]}{'' if higher else ', ms'}",
            {name: tuple(one[figure][key] for key in ("median", "least", "most")) for name, one in _figures(result)},
        )
        for figure, higher in COMPARED.items()
    ]
    draw = (lambda path: draw_bars(bars, path)) if result["measured"] else None
    return write_page(page_of(result), result, directory / "serving", draw)


def _figures(result: Result) -> list[tuple[str, Any]]:
    return [(name, result["figures"][name]) for name in result["measured"]]
