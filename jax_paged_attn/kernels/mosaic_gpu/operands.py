"""Operands of the matrix unit from a cache of the unit's own dtype, and the way of weights and outputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from .inline import address, array_of, asm, i32, int32, lane_and_warp
from .layouts import MMA_COLUMNS, MMA_DEPTH, TURNED, MatrixUnit, along_rows, full

MATRIX = 8  # rows, and 2-byte columns, of one of the 4 matrices that an instruction loads


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

    def load_weights(self, smem: Any) -> jax.Array:
        """[keys, heads] -> the same."""
        if self.interpret:
            return plgpu.load(smem, layout=self.rhs, optimized=False)
        shape = smem.shape
        return plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),),
            return_type=plgpu.ShapeDtypeStruct(shape, self.dtype, layout=self.rhs),
        )(lambda _, ref: array_of(_load_turned(ref, *shape, self.dtype), shape, self.rhs))(smem)

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
        self.meet()
        weights = self.load_weights(p_smem)
        v = self.load_values(v_smem)
        if is_key is not None:  # unused slots may hold NaN, and 0 * NaN is NaN
            row = plgpu.broadcasted_iota(jnp.int32, v.shape[1:], 0, layout=self.lhs.reduce(0))
            v = jnp.where(along_rows(is_key(row), v.shape), v, full(v.shape, 0, self.lhs, self.dtype))
        return self.dot(acc, v, weights)

    def turn(self, acc: jax.Array, refs: dict[str, Any]) -> None:
        """Round an output [columns, heads] to "out_smem" [heads, columns]."""
        refs["acc_smem"][...] = acc
        self.meet()
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


def _load_turned(ref: ir.Value, keys: int, heads: int, dtype: Any) -> np.ndarray:
    """The registers of weights [keys, heads]: 4 matrices of 8 keys and 8 heads at a time, each turned.

    As the compiler loads them, a thread gets neighbours among heads and picks those among keys itself.
    """
    pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype))
    lane, _ = lane_and_warp()
    first = arith.addi(address(ref, int32()), arith.muli(lane, i32(2 * heads)))
    registers = np.empty((keys // MMA_DEPTH, heads // MMA_COLUMNS, 2), object)
    for tile in range(heads // MMA_COLUMNS):
        for key in range(0, keys, 4 * MATRIX):
            words = asm(
                [int32()] * 4,
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
                "=r,=r,=r,=r,r,~{memory}",
                [arith.addi(first, i32(2 * (key * heads + tile * MMA_COLUMNS)))],
                has_side_effects=True,
            )
            chunk = key // MMA_DEPTH
            values = np.array([utils.bitcast(word, pair) for word in words], object)
            registers[chunk : chunk + 2, tile] = values.reshape(2, 2)
    return registers
