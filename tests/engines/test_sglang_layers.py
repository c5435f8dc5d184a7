"""Of which layer a dispatch is, told to the Buffer through the names of SGLang's modules. No engine."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from uccl_ep_serving.engines.sglang import activation
from uccl_ep_serving.engines.sglang.activation import _hook_layers
from uccl_ep_serving.traffic.trace import UNKNOWN_LAYER


class Mode:
    """One of the two modes of a dispatcher, as it gets its Buffer."""

    def __init__(self) -> None:
        self.buffer = SimpleNamespace(layer=None)

    def _get_buffer(self) -> Any:
        return self.buffer


def engine(monkeypatch: pytest.MonkeyPatch, missing: str = "") -> tuple[Any, Any]:
    """SGLang's module of dispatchers, and that of layers, without the name that is ``missing``."""
    kinds = {name: type(name, (Mode,), {"_get_buffer": Mode._get_buffer}) for name in activation._MODES}

    def create_moe_dispatcher(config: Any, *, batches: int = 1) -> Any:
        """The dispatcher of a layer; of overlapped micro-batches one each inside of it."""
        inner = [
            SimpleNamespace(**{name: kind() for name, kind in zip(activation._INNER, kinds.values(), strict=True)})
            for _ in range(batches)
        ]
        return SimpleNamespace(_inners=inner) if batches > 1 else inner[0]

    layers = SimpleNamespace(create_moe_dispatcher=create_moe_dispatcher)
    if missing == "create_moe_dispatcher":
        del layers.create_moe_dispatcher
    elif missing:
        kinds[missing] = type(missing, (), {})
    monkeypatch.setitem(sys.modules, activation._LAYERS, layers)  # type: ignore[arg-type]
    return SimpleNamespace(**kinds), layers


def layers_of(dispatcher: Any) -> list[int]:
    """What the Buffer of each mode is told."""
    return [getattr(dispatcher, name)._get_buffer().layer for name in activation._INNER]


@pytest.mark.parametrize(("layer", "told"), [(7, 7), (0, 0), (None, UNKNOWN_LAYER)])
def test_a_buffer_is_told_of_the_layer_in_either_mode(monkeypatch: pytest.MonkeyPatch, layer: Any, told: int) -> None:
    deepep, layers = engine(monkeypatch)
    _hook_layers(deepep)
    dispatcher = layers.create_moe_dispatcher(SimpleNamespace(layer_id=layer))
    assert layers_of(dispatcher) == [told, told]
    both = layers.create_moe_dispatcher(SimpleNamespace(layer_id=layer), batches=2)
    assert [layers_of(inner) for inner in both._inners] == [[told, told]] * 2


@pytest.mark.parametrize("missing", ["create_moe_dispatcher", *activation._MODES])
def test_where_the_engine_has_no_such_name_nothing_is_changed_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    deepep, layers = engine(monkeypatch, missing)
    before = dict(vars(layers))
    with caplog.at_level(logging.WARNING):
        _hook_layers(deepep)
    assert "UCCL_EP_TRACE: this version of SGLang does not show which layer dispatches" in caplog.text
    assert vars(layers) == before
