"""Named bit ranges inside an integer, checked when they are declared and when they are filled.

A :class:`Word` lists its fields from bit 0 upwards. Kernels and the proxy import the plain integers
(``shift``, ``mask``) because compiled code cannot call methods; encoders used by Python and by tests go
through :meth:`Word.pack`, which refuses a value that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["BitField", "Word"]


@dataclass(frozen=True, slots=True)
class BitField:
    """Bits ``[shift, shift + width)`` of a word."""

    name: str
    shift: int
    width: int
    meaning: str

    @property
    def mask(self) -> int:
        """All ones of the field's width, not shifted."""
        return (1 << self.width) - 1

    @property
    def limit(self) -> int:
        """Largest value that fits."""
        return self.mask

    def get(self, word: int) -> int:
        """The field's value in ``word``."""
        return (word >> self.shift) & self.mask

    def put(self, value: int) -> int:
        """``value`` moved to its place. Raises ValueError when it does not fit."""
        if not 0 <= value <= self.limit:
            raise ValueError(f"{self.name} = {value} does not fit {self.width} bits (0..{self.limit})")
        return value << self.shift


class Word:
    """An integer of ``bits`` bits divided into fields that follow each other from bit 0."""

    def __init__(self, name: str, bits: int, *fields: tuple[str, int, str]) -> None:
        self.name = name
        self.bits = bits
        self._fields: dict[str, BitField] = {}
        shift = 0
        for field_name, width, meaning in fields:
            if width <= 0 or field_name in self._fields:
                raise ValueError(f"{name}: bad field {field_name!r}")
            self._fields[field_name] = BitField(field_name, shift, width, meaning)
            shift += width
        if shift > bits:
            raise ValueError(f"{name}: fields need {shift} bits, the word has {bits}")
        self.used = shift

    def __getitem__(self, field_name: str) -> BitField:
        return self._fields[field_name]

    def __iter__(self) -> Iterator[BitField]:
        return iter(self._fields.values())

    def pack(self, **values: int) -> int:
        """Combine field values; fields not named are zero. Raises ValueError on an unknown name or a misfit."""
        unknown = values.keys() - self._fields.keys()
        if unknown:
            raise ValueError(f"{self.name} has no field {sorted(unknown)}")
        word = 0
        for field_name, value in values.items():
            word |= self._fields[field_name].put(value)
        return word

    def unpack(self, word: int) -> dict[str, int]:
        """All fields of ``word`` by name."""
        return {field.name: field.get(word) for field in self}
