"""How the rows of a cache lie in shared memory."""

import dataclasses
import math
from typing import Any

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

SWIZZLE_ROWS = 8
MAX_SWIZZLE, MIN_SWIZZLE = 128, 32  # bytes of a row that are swizzled together


def swizzle_columns(head_dim: int, itemsize: int = 2) -> int:
    """Columns of a shared-memory tile: the widest of 128, 64, 32 and 16 bytes that divides head_dim."""
    return next(c for c in (width // itemsize for width in (128, 64, 32, 16)) if head_dim % c == 0)


@dataclasses.dataclass(frozen=True)
class SharedTile:
    """[.., rows, columns] in shared memory, in pieces of `width` columns.

    Swizzled in groups of 8 rows, matrix operands load from it without bank conflicts. Otherwise rows follow
    one another; a tiling of one row says so, since with none the compiler would choose one of 8 by itself.

    Attributes
    ----------
    dtype : numpy.dtype
    columns, width : int
        Columns of a row and of a piece of it.
    swizzled : bool
    """

    dtype: np.dtype
    columns: int
    width: int
    swizzled: bool

    @classmethod
    def choose(cls, dtype: Any, columns: int, head_dim: int, *, swizzled: bool = False) -> "SharedTile":
        """The widest pieces for columns of which the first `head_dim` hold values."""
        dtype = np.dtype(dtype)
        # 1-byte values alone fill a whole swizzle with 128 columns; others may be wider than one, unswizzled.
        widest = swizzle_columns(head_dim, dtype.itemsize if dtype.itemsize == 1 else 2)
        return cls(dtype, columns, math.gcd(widest, columns), swizzled)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a piece."""
        return self.width * self.dtype.itemsize

    @property
    def transforms(self) -> tuple[Any, ...]:
        """As Pallas describes it."""
        rows = plgpu.TilingTransform((SWIZZLE_ROWS if self.swizzled else 1, self.width))
        if self.swizzled and self.row_bytes >= MIN_SWIZZLE:
            return rows, plgpu.SwizzleTransform(self.row_bytes)
        return (rows,)

    def scratch(self, *lead: int) -> Any:
        """Shared memory for [*lead, columns]."""
        return plgpu.SMEM((*lead, self.columns), self.dtype, transforms=self.transforms)
