"""Tensors that must be equal bit by bit, and where they are not."""

from __future__ import annotations

import torch

__all__ = ["OtherBits", "check_bits", "same_bits"]


class OtherBits(AssertionError):
    """A tensor that is not what is expected.

    Attributes:
        address: of its first element that differs. The model machine's report tells who accessed it last.
    """

    def __init__(self, message: str, address: int) -> None:
        super().__init__(message)
        self.address = address


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes (NaN included)."""
    return (
        actual.shape == expected.shape
        and actual.dtype == expected.dtype
        and torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    )


def check_bits(what: str, actual: torch.Tensor, expected: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """Raise :class:`OtherBits` unless rows have the bits that are expected.

    Args:
        actual: [n, width].
        expected: [m, width].
        rows: [m], which of ``actual`` they are; all by default.
    """
    rows = torch.arange(len(actual)) if rows is None else rows
    found = actual[rows]
    if same_bits(found, expected):
        return
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    size = found.element_size()
    differ = (found.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)).unflatten(1, (-1, size))
    row, column = differ.any(dim=2).nonzero()[0].tolist()
    at = actual.data_ptr() + size * (int(rows[row]) * actual.stride(0) + column * actual.stride(1))
    is_, wanted = found[row, column].item(), expected[row, column].item()
    wrong = f"{int(differ.any(dim=2).sum())} of {differ[..., 0].numel()} elements differ"
    raise OtherBits(f"{what}: row {int(rows[row])}, column {column} is {is_}, expected {wanted}; {wrong}", at)
