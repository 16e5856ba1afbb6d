"""Register layouts and matrix products, with the twins that interpret mode needs.

Scores and outputs are computed with swapped operands: S^T = K Q^T and O^T = V^T P^T. Keys (and the output's
columns) lie on the long side of the matrix instruction, the few query heads of one kv head on its short side,
which comes in steps of 8: a group of 7 then wastes one column in 8 rather than 9 rows in 16. K and V of
16 bits go from swizzled shared memory straight into the operand's registers.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

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
    def max_weight_log2(self) -> int:
        """Log2 of the largest weight: the further up, the smaller are those that float16 takes for 0."""
        return 15 if self.dtype == jnp.float16 else 8

    def meet(self) -> None:
        """Wait for all warps, and for what they have done to shared memory.

        What copies or `wgmma` are to read of it takes a commit_smem(), which costs more.
        """
        if self.interpret:
            plgpu.commit_smem()
        else:
            plgpu.inline_mgpu()(lambda _: utils.warpgroup_barrier())()

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


def full(shape: tuple[int, ...], value, layout, dtype=f32) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[columns] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, shape, (1,))


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[rows] -> [rows, columns]."""
    return lax.broadcast_in_dim(x, shape, (0,))
