"""What the columns of a tile of scores are: query heads of one kv head, of one query token or of several."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .integers import div, rem

i32 = jnp.int32


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a tile.

    A kv head's columns are its query heads for a row's first query token, then for the second, and so on.

    Attributes
    ----------
    count : int
        Columns of the tile.
    group_size : int
        Query heads of a kv head.
    kv_head, first : scalar
        Whose columns they are, and which of those is the first.
    """

    count: int
    group_size: int
    kv_head: Any
    first: Any

    def tokens(self, layout: Any) -> Any:
        """Which query token each is of, for scores of this layout."""
        column = plgpu.broadcasted_iota(i32, (self.count,), 0, layout=layout.reduce(0))
        return div(column + self.first, self.group_size)

    def bring(self, values_gmem: Any, factor: Any, values_smem: Any) -> None:
        """Bring what each query head has one of, times `factor`; a barrier makes it visible."""
        first_head = self.kv_head * self.group_size
        # All loads before the first store, so that they are in flight together.
        values = [values_gmem[first_head + rem(self.first + c, self.group_size)] for c in range(self.count)]
        for c, value in enumerate(values):
            values_smem[c] = value * factor

    def load(self, values_smem: Any, layout: Any) -> Any:
        """What was brought, [count], for scores of this layout."""
        return plgpu.load(values_smem, layout=layout.reduce(0), optimized=False)
