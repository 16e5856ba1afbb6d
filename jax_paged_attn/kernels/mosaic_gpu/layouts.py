"""Register layouts and matrix products, with the twins that interpret mode needs.

Scores and outputs are computed with swapped operands: S^T = K Q^T and O^T = V^T P^T. Keys (and the output's
columns) lie on the long side of the matrix instruction, the few query heads of one kv head on its short side,
which comes in steps of 8: a group of 7 then wastes one column in 8 rather than 9 rows in 16. K and V of
16 bits go from swizzled shared memory straight into the operand's registers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

f32 = jnp.float32
NUM_WARPS = 4
LANES = 32
THREADS = LANES * NUM_WARPS
WARP_ROWS = 16
MMA_ROWS = NUM_WARPS * WARP_ROWS  # the long side of one matrix instruction over a warpgroup
MMA_COLUMNS = 8  # the step of its short side
MMA_DEPTH = 16  # the step of the summed dimension, for 2-byte operands

# One int32 a thread.
ONE_EACH = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)

# Sums of the rows of scores that a thread holds, [FOLDED_ROWS, heads].
FOLDED_ROWS = NUM_WARPS * 8
FOLDED = plgpu.Layout.TILED(
    plgpu.Tiling(((FOLDED_ROWS, MMA_COLUMNS), (FOLDED_ROWS // NUM_WARPS, MMA_COLUMNS), (2,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)

# A piece of an output, [columns of head_dim, heads], as it lies in memory: a warp has 4 rows of 8 neighbours.
PIECE_ROWS = 16
PIECE = plgpu.Layout.TILED(
    plgpu.Tiling(((PIECE_ROWS, MMA_COLUMNS), (PIECE_ROWS // NUM_WARPS, MMA_COLUMNS), (1,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)

# The same piece turned, [heads, columns], to be stored as a part of an output row.
TURNED = plgpu.Layout.TILED(
    plgpu.Tiling(((MMA_COLUMNS, PIECE_ROWS), (MMA_COLUMNS // NUM_WARPS, PIECE_ROWS), (1,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)

# The same for columns that `ByteOperands` has exchanged: lane 8 b + a of a row has column 2 a + b.
TURNED_EXCHANGED = plgpu.Layout.TILED(
    plgpu.Tiling(((MMA_COLUMNS, PIECE_ROWS), (MMA_COLUMNS // NUM_WARPS, PIECE_ROWS), (2,), (1,))),
    warp_dims=(-6,),
    lane_dims=(-4, -2, -3),
    vector_dim=-1,
)


@dataclasses.dataclass(frozen=True)
class MatrixUnit:
    """Layouts of `plgpu.mma` operands of `dtype` over four warps, and the product itself."""

    dtype: jnp.dtype
    interpret: bool

    @property
    def headroom(self) -> int:
        """Log2 of the largest weight: the further up, the smaller are those that float16 takes for 0."""
        return 15 if self.dtype == jnp.float16 else 0

    @property
    def slack(self) -> int:
        """Log2 of how far scores may rise above the maximum that weights refer to before it follows them."""
        return 0

    @property
    def lhs(self):
        return plgpu.Layout.MMA_LHS(self.dtype, m_warps=NUM_WARPS)

    @property
    def rhs(self):
        return plgpu.Layout.MMA_RHS(self.dtype, m_warps=NUM_WARPS)

    @property
    def acc(self):
        return plgpu.Layout.MMA_ACC(self.dtype, m_warps=NUM_WARPS)

    def dot(self, acc: jax.Array, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """acc + lhs @ rhs, accumulated in float32."""
        if self.interpret:  # interpret mode has no rule for mma
            return acc + jnp.dot(lhs, rhs, preferred_element_type=f32)
        return plgpu.mma(acc, lhs, rhs)

    def any_above(self, x: jax.Array, limits: jax.Array) -> jax.Array:
        """Whether any value of [keys, heads] is above its head's limit; for units with slack."""
        raise NotImplementedError

    def max_over_keys(self, x: jax.Array, max_smem: Any) -> jax.Array:
        """[keys, heads] -> [heads], by way of `max_smem` where the unit has such."""
        del max_smem
        return x.max(axis=0)

    def fold(self, x: jax.Array) -> jax.Array:
        """[keys, heads] -> [FOLDED_ROWS, heads]: sums over the keys that a thread holds."""
        heads = x.shape[1]
        if self.interpret:
            rows = FOLDED_ROWS // NUM_WARPS
            return x.reshape(-1, NUM_WARPS, 2, rows, heads).sum(axis=(0, 2)).reshape(FOLDED_ROWS, heads)
        return plgpu.inline_mgpu(
            arg_types=(self.acc,),
            return_type=plgpu.ShapeDtypeStruct((FOLDED_ROWS, heads), f32, layout=FOLDED),
        )(lambda _, x: array_of(_folded(registers_of(x)), (FOLDED_ROWS, heads), FOLDED))(x)


class Operands(MatrixUnit):
    """The two products of a tile, and the way of the output to shared memory: of the unit's own dtype."""

    def load_queries(self, smem: Any) -> tuple[Any, jax.Array | None]:
        """[heads, columns] -> (what `scores` takes, a factor [heads] that scores lack, or None)."""
        return plgpu.load(smem.transpose((1, 0)), layout=self.rhs, optimized=False), None

    def load_keys(self, smem: Any) -> jax.Array:
        """[keys, columns] -> the same."""
        return plgpu.load(smem, layout=self.lhs, optimized=False)

    def load_values(self, smem: Any) -> jax.Array:
        """[keys, columns] -> [columns, keys]."""
        return plgpu.load(smem.transpose((1, 0)), layout=self.lhs, optimized=False)

    def scores(self, k_smem: Any, queries: Any) -> jax.Array:
        """K Q^T, [keys, heads]."""
        zeros = full((k_smem.shape[0], queries.shape[1]), 0, self.acc)
        return self.dot(zeros, self.load_keys(k_smem), queries)

    def add_values(
        self,
        acc: jax.Array,
        v_smem: Any,
        probs: jax.Array,
        p_smem: Any,
        is_key: Callable[[jax.Array], jax.Array] | None,
    ) -> jax.Array:
        """acc [columns, heads] + V^T P of the weights [keys, heads], by way of `p_smem`.

        `is_key` tells rows that are keys from those that are not; without it all are.
        """
        p_smem[...] = probs.astype(self.dtype)
        plgpu.commit_smem()
        probs = plgpu.load(p_smem, layout=self.rhs, optimized=False)
        v = self.load_values(v_smem)
        if is_key is not None:  # unused slots may hold NaN, and 0 * NaN is NaN
            row = plgpu.broadcasted_iota(jnp.int32, v.shape[1:], 0, layout=self.lhs.reduce(0))
            v = jnp.where(along_rows(is_key(row), v.shape), v, full(v.shape, 0, self.lhs, self.dtype))
        return self.dot(acc, v, probs)

    def turn(self, acc: jax.Array, refs: dict[str, Any]) -> None:
        """Round an output [columns, heads] to "out_smem" [heads, columns]."""
        refs["acc_smem"][...] = acc
        plgpu.commit_smem()
        turned = plgpu.load(refs["acc_smem"].transpose((1, 0)), layout=TURNED, optimized=False)
        refs["out_smem"][...] = self.in_order(turned).astype(refs["out_smem"].dtype)
        plgpu.commit_smem()

    def in_order(self, turned: jax.Array) -> jax.Array:
        """Give the columns of an output [heads, columns], in the layout `TURNED`, the cache's order."""
        return turned

    def store_piece(self, acc: jax.Array, refs: dict[str, Any], gmem: Any) -> None:
        """Begin to write a piece of an output."""
        refs["acc_smem"][...] = acc
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs["acc_smem"], gmem)


def registers_of(acc: Any) -> np.ndarray:
    """Of an `acc` [rows, columns], as [rows / 64, columns / 8, 2]: a warp has 8 rows of 8 columns in each."""
    return acc.registers.reshape(-1, acc.shape[1] // MMA_COLUMNS, 2)


def array_of(
    registers: np.ndarray, shape: tuple[int, ...], layout: Any, is_signed: bool | None = None
) -> Any:
    """An array of these registers, in the order that `layout` counts them in, inside `inline_mgpu`."""
    layout = layout.to_mgpu()
    return fragmented_array.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=is_signed
    )


def _folded(registers: np.ndarray) -> np.ndarray:
    """Of [keys / 64, heads / 8, 2] registers, sums for each 8 heads."""
    sums = np.empty(registers.shape[1], dtype=object)
    for i in range(len(sums)):
        sums[i] = functools.reduce(arith.addf, registers[:, i].ravel())
    return sums


def full(shape: tuple[int, ...], value, layout, dtype=f32) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[columns] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, shape, (1,))


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[rows] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, shape, (0,))
