"""Files of routing traces: what is written is read, and damage is refused by name."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.traffic.trace import Whole, load, write_histogram, write_whole

EXPERTS, TOPK = 16, 4


def some_ids(tokens: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).permuted(np.tile(np.arange(EXPERTS), (tokens, 1)), axis=1)[:, :TOPK]


def written(path: Path, records: list[Whole], rank: int = 0, ranks: int = 2) -> Path:
    write_whole(path, rank=rank, ranks=ranks, experts=EXPERTS, topk=TOPK, records=records)
    return path


def counted(path: Path, counts: dict[int, Any]) -> Path:
    arrays = {layer: np.array(one, np.int64) for layer, one in counts.items()}
    dispatches = dict.fromkeys(counts, 3)
    write_histogram(path, rank=0, ranks=1, experts=EXPERTS, topk=TOPK, counts=arrays, dispatches=dispatches)
    return path


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
    with pytest.raises(ConfigError, match=r"has no layer 5, only 3, 4"):
        load(tmp_path, 5)


def test_a_replay_takes_consecutive_tokens_of_one_rank_without_padding(tmp_path: Path) -> None:
    ids = some_ids(6)
    ids[2] = -1
    ids[4, 1] = -1
    trace = load(written(tmp_path / "a.npz", [Whole(0, 0, 0, ids), Whole(0, 1, 0, np.full((2, TOPK), -1))]))
    kept = torch.from_numpy(ids[[0, 1, 3, 5]].astype(np.int64))
    got = trace.draw(7, 6, generator())
    assert got.dtype == torch.int64
    assert torch.equal(got, torch.cat([kept, kept[:2]]))
    assert trace.histogram.sum() == 5 * TOPK - 1
    empty = load(written(tmp_path / "b.npz", [Whole(0, 0, 0, np.full((2, TOPK), -1))]))
    with pytest.raises(ConfigError, match="nothing to replay"):
        empty.draw(0, 4, generator())


def test_a_histogram_is_replayed_by_drawing_from_it(tmp_path: Path) -> None:
    counts = np.zeros(EXPERTS, np.int64)
    counts[:6] = (50, 10, 10, 10, 10, 10)
    trace = load(counted(tmp_path / "a.npz", {2: counts, 5: counts}), 2)
    got = trace.draw(0, 2000, generator())
    assert got.shape == (2000, TOPK)
    assert all(len(set(row)) == TOPK for row in got.tolist())
    found = np.bincount(got.flatten().numpy(), minlength=EXPERTS)
    assert not found[6:].any()
    assert found[0] > 1.2 * found[1:6].max()
    assert torch.equal(got, trace.draw(0, 2000, generator()))
    assert not torch.equal(got, trace.draw(0, 2000, generator(1)))
    assert trace.draw(0, 0, generator()).shape == (0, TOPK)
    few = load(counted(tmp_path / "few.npz", {0: [1, 1, 1] + [0] * (EXPERTS - 3)}))
    with pytest.raises(ConfigError, match="counts 3 experts"):
        few.draw(0, 1, generator())


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
