"""Which keys of a row its queries see: the range to read, the range that needs no mask, and the masks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_paged_attn.calls.modifiers import first_visible, window_size

from .layouts import along_rows


@dataclasses.dataclass(frozen=True)
class Window:
    """What a row's queries see of its keys.

    Attributes
    ----------
    q_len, mask_len : int
        Queries a row, the last of which sits at its last key; last keys that a mask decides about.
    causal : bool
        Whether a query sees no key after its own, apart from the mask.
    left : int32 scalar or None
        How many keys before its own a query sees, apart from the mask; negative or None is all.
    """

    q_len: int = 1
    mask_len: int = 0
    causal: bool = True
    left: Any = None

    @property
    def differs(self) -> bool:
        """Whether queries of a row see other keys than the others, or some between which others lie."""
        return self.mask_len > 0 or (self.q_len > 1 and (self.causal or self.left is not None))

    def first_key(self, kv_len: Any, kv_start: Any) -> Any:
        """The first key that some query sees; None where that is the first of all in every row."""
        return first_visible(self.q_len, self.mask_len, kv_len, kv_start, self.left)

    def seen_by_all(self, row: Any) -> tuple[Any, Any]:
        """[first, end) of the keys that every query sees; a first of None is 0."""
        first, end = row.kv_start, row.kv_len
        if not self.differs:
            return first, end
        if self.left is not None:
            first = jnp.maximum(first, row.kv_len - 1 - window_size(self.left))
        hidden = max(self.q_len - 1 if self.causal else 0, self.mask_len)
        return first, jnp.maximum(end - hidden, 0)

    def sees(
        self, row: Any, position: jax.Array, token: jax.Array, is_drafted: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """Whether each column sees the key at `position` [keys, columns], one of the row's.

        `token` [columns] tells which of the row's query tokens a column is of, and `is_drafted` what the mask
        says of its columns [keys, columns].
        """
        query = token + (row.kv_len - self.q_len)
        sees = position >= 0
        if self.causal:
            sees = position <= along_rows(query, position.shape)
        if self.left is not None:
            # The position of a query before the first key is below 0, where no window may be taken from it.
            first = jnp.maximum(query, 0) - window_size(self.left)
            sees &= position >= along_rows(first, position.shape)
        if self.mask_len:
            column = position - (row.kv_len - self.mask_len)
            sees = jnp.where(column >= 0, is_drafted(column), sees)
        return sees
