"""The running state of a softmax over tiles of keys (arXiv 1805.02867)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class State(NamedTuple):
    """What queries have seen: their greatest score, the sum of their weights, the weighted sum of values.

    `peak` and `total` are [*queries], `acc` is [*queries, columns].
    """

    peak: jax.Array
    total: jax.Array
    acc: jax.Array

    @classmethod
    def empty(cls, queries: tuple[int, ...], columns: int) -> "State":
        return cls(
            jnp.full(queries, -jnp.inf, jnp.float32),
            jnp.zeros(queries, jnp.float32),
            jnp.zeros((*queries, columns), jnp.float32),
        )

    def weigh(self, scores: jax.Array) -> tuple["State", jax.Array]:
        """-> (the state without the tile's values, the weights of its keys), of scores [*queries, keys]."""
        peak = jnp.maximum(self.peak, jnp.max(scores, axis=-1))
        # Until a query meets a valid key its peak is -inf, and subtracting that would make NaN.
        shift = jnp.where(peak == -jnp.inf, 0.0, peak)
        weights, decay = jnp.exp(scores - shift[..., None]), jnp.exp(self.peak - shift)
        total = self.total * decay + jnp.sum(weights, axis=-1)
        return State(peak, total, self.acc * decay[..., None]), weights

    def add(self, partial: jax.Array) -> "State":
        """Add a tile's weighted values."""
        return self._replace(acc=self.acc + partial)

    def result(self) -> tuple[jax.Array, jax.Array]:
        """(out, lse): 0 and -inf where no key was valid."""
        out = self.acc / jnp.where(self.total == 0.0, 1.0, self.total)[..., None]
        return out, self.peak + jnp.log(self.total)
