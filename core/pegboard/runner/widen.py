"""Tables that grow."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Element = TypeVar("Element", bound=np.generic)


def widen(table: NDArray[Element], width: int) -> NDArray[Element]:
    """The table, or a copy of it with at least `width` zeroed columns.

    Growing at least doubles, so that it is rare.
    """
    rows, columns = table.shape
    if width <= columns:
        return table
    wider = np.zeros((rows, max(width, 2 * columns)), dtype=table.dtype)
    wider[:, :columns] = table
    return wider
