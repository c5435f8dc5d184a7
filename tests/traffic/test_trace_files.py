"""Files of routing traces: what is written is read, and damage is refused by name."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.traffic.trace import Whole, digest, load, write_whole

EXPERTS, TOPK = 16, 4


def some_ids(tokens: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).permuted(np.tile(np.arange(EXPERTS), (tokens, 1)), axis=1)[:, :TOPK]


def written(path: Path, records: list[Whole], rank: int = 0, ranks: int = 2) -> Path:
    write_whole(path, rank=rank, ranks=ranks, experts=EXPERTS, topk=TOPK, records=records)
    return path


def test_dispatches_of_several_ranks_come_back_by_layer(tmp_path: Path) -> None:
    first = [Whole(layer, step, 0, some_ids(3 + step, layer * 10 + step)) for step in range(3) for layer in (3, 4)]
    written(tmp_path / "a.npz", first)
    written(tmp_path / "b.npz", [Whole(4, 0, 1, some_ids(5, 9))], rank=1)
    trace = load(tmp_path, 4)
    assert (trace.experts, trace.topk, trace.ranks, trace.layers) == (EXPERTS, TOPK, 2, (3, 4))
    assert [(one.layer, one.step, one.mode) for one in trace.steps[0]] == [(4, 0, 0), (4, 1, 0), (4, 2, 0)]
    for one, record in zip(trace.steps[0], first[1::2], strict=True):
        assert np.array_equal(one.ids, record.ids)
    assert trace.histogram.sum() == TOPK * (3 + 4 + 5 + 5)
    assert [one.layer for one in load(tmp_path).steps[0]] == [3, 4] * 3
    assert sorted(load(tmp_path).counts) == [3, 4]
    with pytest.raises(ConfigError, match=r"has no layer 5, only 3, 4"):
        load(tmp_path, 5)


def test_a_digest_is_of_all_files(tmp_path: Path) -> None:
    written(tmp_path / "a.npz", [Whole(0, 0, 0, some_ids(2))])
    one = digest(tmp_path)
    assert one == digest(tmp_path / "a.npz") == digest(tmp_path)
    written(tmp_path / "b.npz", [Whole(0, 0, 0, some_ids(2))], rank=1)
    assert digest(tmp_path) != one
    with pytest.raises(ConfigError, match="cannot be read"):
        digest(tmp_path / "c.npz")


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "a.npz", [Whole(0, 0, 0, some_ids(1))])
    written(tmp_path / "b.npz", [Whole(0, 0, 0, some_ids(1))], ranks=4)
    with pytest.raises(ConfigError, match=r"b\.npz: ranks = 4, and .*a\.npz has 2"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="has no routing trace"):
        load(Path("/proc/self/fdinfo"))
    with pytest.raises(ConfigError, match="there is no routing trace"):
        load(tmp_path / "c.npz")


@pytest.mark.parametrize("place", np.linspace(0, 0.99, 25).tolist())
def test_damage_is_refused_by_name_or_changes_nothing(tmp_path: Path, place: float) -> None:
    """Cut off, or one byte changed: never another trace, never another error."""
    path = written(tmp_path / "a.npz", [Whole(0, 0, 0, some_ids(40))])
    content = path.read_bytes()
    whole = load(path)
    at = int(place * len(content))
    path.write_bytes(content[:at])
    with pytest.raises(ConfigError, match=r"a\.npz is no whole routing trace"):
        load(path)
    path.write_bytes(content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :])
    try:
        read = load(path)
    except ConfigError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        assert np.array_equal(read.histogram, whole.histogram)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("format", np.int64(2), "format 2, and this version reads 1"),
        ("what", np.array("all"), "what = 'all'"),
        ("topk", np.int64(17), "top-17 of 16"),
        ("rank", np.int64(2), "rank 2 of 2"),
        ("experts", np.float64(16), "no integer"),
        ("layer", np.zeros(2, np.int32), "not of one length"),
        ("tokens", np.array([7], np.int32), "7 tokens"),
        ("tokens", np.array([-3], np.int32), "tokens"),
        ("ids", np.full((3, TOPK), 16, np.int16), r"ids 16 \.\. 16"),
        ("ids", np.full((3, TOPK), 1.0), "not of integers"),
        ("ids", np.array([{}]), "pickle"),
        ("mode", np.array([2], np.uint8), "mode"),
        ("step", None, "'step"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, name: str, value: Any, why: str) -> None:
    path = written(tmp_path / "a.npz", [Whole(0, 0, 0, some_ids(3))])
    with np.load(path) as arrays:
        changed: dict[str, Any] = {**arrays, name: value}
    if value is None:
        del changed[name]
    np.savez(path, **changed)
    with pytest.raises(ConfigError, match=f"a.npz is no whole routing trace: .*{why}"):
        load(path)


def test_a_file_that_unpacks_to_too_much_is_not_unpacked(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (1 << 28,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("ids.npy", "w", force_zip64=True) as file:
            file.write(header.getvalue())
        archive.infolist()[0].file_size = 1 << 31
    with pytest.raises(ConfigError, match="more than the"):
        load(tmp_path / "a.npz")
