"""Online softmax over tiles of keys, keys down the rows and query heads across the columns.

After M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018 (arXiv 1805.02867), in
base 2: scores come multiplied by log2(e), so that the exponential is the hardware's own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import reductions
from .layouts import MatrixUnit, along_columns, along_rows, f32, full
from .reductions import FOLDED, FOLDED_ROWS

LOG2_E = float(np.log2(np.e))
LN_2 = float(np.log(2.0))
# Log2 of how far scores may rise above those that weights refer to before weights follow: most tiles then
# need no maximum over all threads, and no output rescaled.
SLACK = 8
# Below every score, yet finite: differences of two of them are 0, not NaN.
LOWEST = float(np.finfo(np.float32).min)


class State(NamedTuple):
    """What a row has seen: a score that weights refer to, near the greatest, and the sum of its weights.

    `max_log2` is [heads]; `weights` is [rows, heads], not yet summed between threads.
    """

    max_log2: jax.Array
    weights: jax.Array

    @classmethod
    def empty(cls, heads: int) -> "State":
        weights = full((FOLDED_ROWS, heads), 0.0, FOLDED)
        return cls(full((heads,), LOWEST, FOLDED.reduce(0)), weights)

    def update(
        self,
        unit: MatrixUnit,
        smem: Any,
        acc: jax.Array,
        scores_log2: jax.Array,
        valid: jax.Array | None,
        bias: jax.Array | None = None,
    ) -> tuple["State", jax.Array, jax.Array]:
        """-> (new state, the output so far [columns, heads] in its terms, the tile's weights).

        Scores are [keys, heads]; `smem` is that of `reductions`. Weights are at most
        2**unit.max_weight_log2; with a `bias` [keys], those times 2**bias are.
        """
        if valid is not None:
            scores_log2 = jnp.where(valid, scores_log2, f32(LOWEST))
        biased = scores_log2
        if bias is not None:
            biased = scores_log2 + along_columns(bias, scores_log2.shape)
            if valid is not None:  # unused scales may be NaN
                biased = jnp.where(valid, biased, f32(LOWEST))

        def follow() -> tuple["State", jax.Array]:
            peak = reductions.over_threads(unit, reductions.fold(unit, biased, "max"), "max", smem)
            max_log2 = jnp.maximum(self.max_log2, peak - f32(unit.max_weight_log2 - SLACK))
            rescale = jnp.exp2(self.max_log2 - max_log2)
            weights = self.weights * along_rows(rescale, self.weights.shape)
            return State(max_log2, weights), acc * along_rows(rescale, acc.shape)

        limits = self.max_log2 + f32(unit.max_weight_log2)
        state, acc = lax.cond(reductions.any_above(unit, biased, limits), follow, lambda: (self, acc))
        exponent = scores_log2 - along_rows(state.max_log2, scores_log2.shape)
        # Scores beyond 2**24 may be above a maximum that was rounded down, which float16 has no room for.
        if bias is None and unit.dtype == jnp.float16:
            exponent = jnp.minimum(exponent, f32(unit.max_weight_log2))
        p = jnp.exp2(exponent)
        if valid is not None:  # where no key was valid so far, max_log2 is LOWEST and p would be 1
            p = jnp.where(valid, p, f32(0))
        return state._replace(weights=state.weights + reductions.fold(unit, p, "sum")), acc, p
