"""Files of routing traces: which experts the tokens of a rank chose, dispatch by dispatch or counted.

A file is an ``.npz`` of plain arrays (docs/architecture/formats.md names them); nothing in it is ever unpickled. Ids
are those that dispatch was given: physical ones, where an engine has replicated or moved experts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

__all__ = [
    "FORMAT",
    "MODES",
    "UNKNOWN_LAYER",
    "WHAT",
    "Trace",
    "Whole",
    "digest",
    "load",
    "write_histogram",
    "write_whole",
]

FORMAT = 1
WHAT = ("histogram", "whole")
#: Names of the numbers in the array ``mode``.
MODES = ("low-latency", "normal")
#: The layer of dispatches of which the caller has not said it.
UNKNOWN_LAYER = -1
#: Largest file that is read: a recorder writes much smaller ones.
_MOST_BYTES = 1 << 30
_MOST_EXPERTS = 1 << 16

Ids = npt.NDArray[np.integer[Any]]
_HEAD = ("format", "what", "rank", "ranks", "experts", "topk")
_ARRAYS = {"whole": ("layer", "step", "mode", "tokens", "ids"), "histogram": ("layer", "dispatches", "counts")}


class Whole(NamedTuple):
    """One dispatch of one rank.

    Attributes:
        layer: of the model, or UNKNOWN_LAYER.
        step: how many dispatches of that layer came before.
        mode: index in MODES.
        ids: [T, K], -1 = none.
    """

    layer: int
    step: int
    mode: int
    ids: Ids


def id_dtype(experts: int) -> type[np.integer[Any]]:
    """The smallest dtype of a file for ids below ``experts``."""
    return np.int16 if experts <= np.iinfo(np.int16).max else np.int32


def write_whole(path: Path, *, rank: int, ranks: int, experts: int, topk: int, records: Sequence[Whole]) -> int:
    """Write a file of whole dispatches, all of it or nothing. Returns its bytes. Raises OSError."""
    ids = [record.ids for record in records]
    arrays: dict[str, Any] = {
        "layer": np.array([record.layer for record in records], np.int32),
        "step": np.array([record.step for record in records], np.int64),
        "mode": np.array([record.mode for record in records], np.uint8),
        "tokens": np.array([len(one) for one in ids], np.int32),
        "ids": np.concatenate([np.empty((0, topk), id_dtype(experts)), *ids], dtype=id_dtype(experts)),
    }
    return _write(path, {**_head("whole", rank, ranks, experts, topk), **arrays})


def write_histogram(
    path: Path,
    *,
    rank: int,
    ranks: int,
    experts: int,
    topk: int,
    counts: Mapping[int, npt.NDArray[np.int64]],
    dispatches: Mapping[int, int],
) -> int:
    """Write a file of counts by layer, all of it or nothing. Returns its bytes. Raises OSError.

    Args:
        counts: by layer, int64 [E]: how often each expert was chosen.
        dispatches: by layer, how many dispatches were counted.
    """
    layers = sorted(counts)
    arrays: dict[str, Any] = {
        "layer": np.array(layers, np.int32),
        "dispatches": np.array([dispatches[layer] for layer in layers], np.int64),
        "counts": np.array([counts[layer] for layer in layers], np.int64).reshape(len(layers), experts),
    }
    return _write(path, {**_head("histogram", rank, ranks, experts, topk), **arrays})


def _head(what: str, rank: int, ranks: int, experts: int, topk: int) -> dict[str, Any]:
    numbers = {"format": FORMAT, "rank": rank, "ranks": ranks, "experts": experts, "topk": topk}
    return {"what": np.array(what), **{name: np.array(value, np.int64) for name, value in numbers.items()}}


def _write(path: Path, arrays: Mapping[str, Any]) -> int:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".trace", delete=False) as file:
        try:
            np.savez(file, **arrays)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
    return path.stat().st_size


@dataclass(frozen=True)
class Trace:
    """What one or several files say of one layer, or of all.

    Attributes:
        experts, topk: E and K of the dispatches.
        ranks: of the group that recorded.
        layers: all that the files have, in ascending order; -1: dispatches whose layer nobody said.
        counts: int64 [E] by layer that was asked for, how often each expert was chosen.
        steps: whole dispatches by recording rank, each in the order in which they came; no ranks where the files are
            histograms.
    """

    experts: int
    topk: int
    ranks: int
    layers: tuple[int, ...]
    counts: Mapping[int, npt.NDArray[np.int64]]
    steps: Mapping[int, tuple[Whole, ...]]

    @property
    def histogram(self) -> npt.NDArray[np.int64]:
        """int64 [E], how often each expert was chosen by the layers that were asked for."""
        return sum(self.counts.values(), start=np.zeros(self.experts, np.int64))


def _files(place: Path) -> list[Path]:
    """A file, or those of a directory. Raises ConfigError."""
    files = sorted(place.glob("*.npz")) if place.is_dir() else [place]
    if not files:
        raise ConfigError(f"{place} has no routing trace (*.npz). Next step: serve with UCCL_EP_TRACE={place}")
    return files


def digest(path: str | os.PathLike[str]) -> str:
    """Of all that :func:`load` reads, equal for equal files. Raises ConfigError."""
    found = hashlib.sha256()
    for file in _files(Path(path)):
        try:
            found.update(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"the routing trace {file} cannot be read: {error}") from None
    return found.hexdigest()


def load(path: str | os.PathLike[str], layer: int | None = None) -> Trace:
    """Read a trace file, or all files of a directory, of dispatches to the same experts.

    Args:
        layer: only what this layer has chosen; None: all layers together, in the order of their steps.

    Raises:
        ConfigError: there is no such file or layer, a file is damaged or of another format (named, with what is wrong
            in it), or the files do not belong together.
    """
    place, files = Path(path), _files(Path(path))
    read = [_read(file) for file in files]
    first = read[0]
    for file, one in zip(files, read, strict=True):
        for name in ("what", "experts", "topk", "ranks"):
            if one[name] != first[name]:
                raise ConfigError(
                    f"{file}: {name} = {one[name]}, and {files[0]} has {first[name]}: they are no traces of the same "
                    "layers. Next step: name one file, or move the others elsewhere"
                )
    layers = tuple(sorted({int(number) for one in read for number in one["layer"]}))
    if layer is not None and layer not in layers:
        raise ConfigError(f"{place} has no layer {layer}, only {', '.join(map(str, layers)) or 'none'}")
    counts: dict[int, npt.NDArray[np.int64]] = defaultdict(lambda: np.zeros(first["experts"], np.int64))
    steps: dict[int, list[Whole]] = {}
    for one in read:
        starts = np.cumsum(one["tokens"], dtype=np.int64) - one["tokens"] if one["what"] == "whole" else None
        for index, number in enumerate(one["layer"].tolist()):
            if layer not in (None, number):
                continue
            if starts is None:
                counts[number] += one["counts"][index]
                continue
            ids = one["ids"][starts[index] : starts[index] + one["tokens"][index]]
            record = Whole(number, int(one["step"][index]), int(one["mode"][index]), ids)
            steps.setdefault(one["rank"], []).append(record)
            counts[number] += np.bincount(ids[ids >= 0], minlength=first["experts"])
    ordered = {rank: tuple(sorted(records, key=lambda one: one[:2][::-1])) for rank, records in steps.items()}
    return Trace(first["experts"], first["topk"], first["ranks"], layers, dict(counts), ordered)


def _read(path: Path) -> dict[str, Any]:
    """The arrays of a file, checked. Raises ConfigError that names it."""
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ValueError(f"it has {size} bytes, more than the {_MOST_BYTES} that are read")
        with zipfile.ZipFile(path) as archive:
            if (inside := sum(one.file_size for one in archive.infolist())) > _MOST_BYTES:
                raise ValueError(f"its arrays have {inside} bytes, more than the {_MOST_BYTES} that are read")
        with np.load(path, allow_pickle=False) as arrays:
            head = {name: arrays[name].item() for name in _HEAD}
            if head["format"] != FORMAT:
                raise ValueError(f"it is of format {head['format']}, and this version reads {FORMAT}")
            if head["what"] not in WHAT:
                raise ValueError(f"what = {head['what']!r} must be {' or '.join(WHAT)}")
            found = {name: arrays[name] for name in _ARRAYS[head["what"]]}
        _check(head, found)
    except FileNotFoundError:
        raise ConfigError(f"there is no routing trace {path}") from None
    except Exception as error:  # whatever damage makes NumPy, zipfile and zlib raise
        why = f"{error.args[0]!r} is missing in it" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"{path} is no whole routing trace: {why}. Next step: leave it out, or record again (UCCL_EP_TRACE)"
        ) from None
    return {**head, **found}


def _check(head: Mapping[str, Any], found: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise ValueError unless the arrays of a file are of the right kind and fit each other."""
    for name in ("rank", "ranks", "experts", "topk"):
        if type(head[name]) is not int:
            raise ValueError(f"{name} = {head[name]!r} is no integer")
    experts, topk, layer = head["experts"], head["topk"], found["layer"]
    if not (0 <= head["rank"] < head["ranks"] and 1 <= topk <= experts <= _MOST_EXPERTS):
        raise ValueError(f"rank {head['rank']} of {head['ranks']} with top-{topk} of {experts} experts cannot be")
    if any(one.dtype.kind not in "iu" for one in found.values()):
        raise ValueError("an array is not of integers")
    flat = [name for name in found if name not in ("ids", "counts")]
    if layer.ndim != 1 or any(found[name].shape != layer.shape for name in flat):
        raise ValueError(f"its arrays {', '.join(flat)} are not of one length")
    if head["what"] == "histogram":
        counts = found["counts"]
        if counts.shape != (len(layer), experts) or (counts < 0).any():
            raise ValueError(f"counts{list(counts.shape)} must be [{len(layer)}, {experts}] and not negative")
        return
    ids, tokens = found["ids"], found["tokens"]
    if (tokens < 0).any() or ids.shape != (int(tokens.sum(dtype=np.int64)), topk):
        raise ValueError(f"ids{list(ids.shape)} are not those of {int(tokens.sum(dtype=np.int64))} tokens, {topk} each")
    if len(ids) and not -1 <= int(ids.min()) <= int(ids.max()) < experts:
        raise ValueError(f"ids {int(ids.min())} .. {int(ids.max())} are not all in -1 .. {experts - 1}")
    if (found["mode"] < 0).any() or (found["mode"] >= len(MODES)).any():
        raise ValueError("a mode is unknown")
