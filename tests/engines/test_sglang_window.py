"""Tokens of the low-latency window and running requests: what is chosen, and what is refused. No engine."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uccl_ep_serving.engines.sglang.window import MOST_TOKENS, Steps, choose
from uccl_ep_serving.errors import ConfigError

H200 = Steps(ranks=8, captured=512, running=None)


@pytest.mark.parametrize(
    ("steps", "asked", "expected"),
    [
        pytest.param(H200, None, 512, id="default"),
        pytest.param(dataclasses.replace(H200, ranks=1), None, 512, id="tensor-parallel"),
        pytest.param(dataclasses.replace(H200, captured=24), None, 24, id="small graphs"),
        pytest.param(dataclasses.replace(H200, width=4), None, 512, id="speculation"),
        pytest.param(dataclasses.replace(H200, width=4, running=48), None, 24, id="speculation, bounded"),
        pytest.param(dataclasses.replace(H200, running=256), None, 32, id="few requests"),
        pytest.param(dataclasses.replace(H200, running=4), None, 1, id="fewer than ranks"),
        pytest.param(dataclasses.replace(H200, running=24, multiple=2), None, 4, id="two batches"),
        pytest.param(H200, 128, 128, id="asked for less"),
        pytest.param(H200, 2048, 2048, id="asked for more"),
        pytest.param(dataclasses.replace(H200, running=8192), 1024, 1024, id="asked for what fits"),
    ],
)
def test_window_is_the_smallest_that_holds_the_largest_step(steps: Steps, asked: int | None, expected: int) -> None:
    assert choose(steps, asked) == expected


@pytest.mark.parametrize(
    ("steps", "asked", "words"),
    [
        (
            dataclasses.replace(H200, running=8192),
            None,
            ["--max-running-requests 8192 is 1024 on each of 8", "--max-running-requests 4096", "_PER_RANK=1024"],
        ),
        (dataclasses.replace(H200, running=2048, width=4), None, ["x 4 tokens a request = 1024", "requests 1024"]),
        (dataclasses.replace(H200, running=256), 16, ["the low-latency window holds 16", "requests 128", "=32 on"]),
        (dataclasses.replace(H200, width=8), 4, ["one request takes 8 tokens", "_PER_RANK=8"]),
    ],
)
def test_too_many_requests_are_refused_with_both_ways_out(steps: Steps, asked: int | None, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(steps, asked)
    for word in words:
        assert word in str(caught.value)


def test_a_window_that_no_variable_reaches_is_not_offered() -> None:
    with pytest.raises(ConfigError) as caught:
        choose(dataclasses.replace(H200, running=8 * 8193), None)
    assert "SGLANG_DEEPEP" not in str(caught.value)
    assert "--max-running-requests 4096" in str(caught.value)


@given(
    steps=st.builds(
        Steps,
        ranks=st.integers(1, 64),
        captured=st.integers(1, 1024),
        running=st.none() | st.integers(1, 1 << 16),
        width=st.integers(1, 16),
        multiple=st.integers(1, 4),
    ),
    asked=st.none() | st.integers(1, 8192),
)
def test_every_step_that_may_come_fits(steps: Steps, asked: int | None) -> None:
    """The requests that SGLang is bounded to fit, and not one more would; those that the user gave are no more."""
    try:
        tokens = choose(steps, asked)
    except ConfigError:
        return
    assert tokens == asked or (asked is None and tokens <= MOST_TOKENS)
    requests = steps.requests(tokens)
    assert steps.tokens(requests) <= tokens < steps.tokens(requests + 1)
    if steps.running is not None:
        assert 1 <= max(1, steps.running // steps.ranks) <= requests
    elif asked is None:
        assert tokens in (MOST_TOKENS, steps.tokens(steps.captured))
