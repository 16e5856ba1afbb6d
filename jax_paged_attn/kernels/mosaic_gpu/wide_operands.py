"""Operands for groups of many query heads: `wgmma` reads them from shared memory.

With the queries in registers a thread has room for 16 heads, and a group of 71 would have the cache read five
times. Here registers hold scores and output alone. What goes from there to shared memory is turned on
its way by `stmatrix`, written in PTX beside a plain twin that interpret mode runs.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from .inline import address, asm, i32, int32, int64, lane_and_warp, offset_in, read_only, registers_of
from .layouts import MMA_COLUMNS, MMA_ROWS, NUM_WARPS, THREADS, f32, full
from .operands import Operands
from .shared_tile import SharedTile

MATRIX = 8  # rows and columns of one of stmatrix
SWIZZLE = 128


@dataclasses.dataclass(frozen=True)
class WideOperands(Operands):
    """Operands that stay in shared memory; `p` and `out` describe what weights and outputs are written to."""

    q: SharedTile
    p: SharedTile
    out: SharedTile

    def bring_queries(self, gmem: Any, first: Any, smem: Any, first_column: int = 0) -> None:
        """Copy the heads of a group [group_size, columns] from `first` on; what lies past them is 0.

        Threads do it, since copies into swizzled rows take groups of multiples of 8 heads only. Columns begin
        at `first_column` of `smem`.
        """
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last row's output may lie there
        group_size, columns = gmem.shape
        heads = smem.shape[0]
        if self.interpret:
            row = first + jnp.arange(heads)
            rows = gmem[...][jnp.minimum(row, group_size - 1)]
            rows = jnp.where((row < group_size)[:, None], rows, jnp.zeros_like(rows))
            smem[:, pl.ds(first_column, columns)] = rows
        else:
            scalar = plgpu.Layout.WG_SPLAT(())
            plgpu.inline_mgpu(arg_types=(read_only(), scalar, plgpu.RefType(self.q.transforms)))(
                lambda _, source, first, target: _copy_rows(
                    source, first.registers.item(), target, self.q, heads, columns, group_size, first_column
                )
            )(gmem, first, smem)
        plgpu.commit_smem()

    def scores(self, k_smem: Any, queries: Any) -> jax.Array:
        if self.interpret:
            return jnp.dot(k_smem[...], queries[...].T, preferred_element_type=f32)

        def multiply(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, k_smem, queries.transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((k_smem.shape[0], queries.shape[0]), f32))

    def add_values(
        self, acc: jax.Array, v_smem: Any, probs: jax.Array, p_smem: Any, is_key: Any
    ) -> jax.Array:
        self._store_turned(probs.astype(self.dtype), p_smem, self.p)
        if is_key is not None:  # unused slots may hold NaN, and 0 * NaN is NaN
            keys, columns = v_smem.shape
            for first in range(0, columns, MMA_ROWS):  # one after another, for few registers
                some = v_smem.at[:, pl.ds(first, MMA_ROWS)]
                layout = plgpu.Layout.SMEM_GMEM_COPY((keys, MMA_ROWS), self.dtype, SWIZZLE)
                v = plgpu.load(some, layout=layout, optimized=False)
                key = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=layout)
                some[...] = jnp.where(is_key(key), v, full(v.shape, 0, layout, self.dtype))
        plgpu.commit_smem()
        if self.interpret:
            return acc + jnp.dot(v_smem[...].T, p_smem[...].T, preferred_element_type=f32)

        def multiply(acc):
            plgpu.wgmma(acc, v_smem.transpose((1, 0)), p_smem.transpose((1, 0)))
            plgpu.wgmma_wait(0)

        return cast(jax.Array, pl.run_state(multiply)(plgpu.ACC.init(acc)))

    def turn(self, acc: jax.Array, refs: dict[str, Any]) -> None:
        self._store_turned(acc.astype(self.dtype), refs["out_smem"], self.out)
        plgpu.commit_smem()

    def store_piece(self, acc: jax.Array, refs: dict[str, Any], gmem: Any) -> None:
        if self.interpret:
            gmem[...] = acc
            return
        heads = acc.shape[1]
        plgpu.inline_mgpu(arg_types=(self.acc, plgpu.RefType()))(
            lambda _, x, ref: _store_words(registers_of(x), ref, heads)
        )(acc, gmem)

    def _store_turned(self, x: jax.Array, smem: Any, tile: SharedTile) -> None:
        """[rows, heads] -> [heads, rows]."""
        if self.interpret:
            smem[...] = x.T
            return
        plgpu.inline_mgpu(arg_types=(self.acc, plgpu.RefType(tile.transforms)))(
            lambda _, x, ref: _store_matrices(registers_of(x), ref, tile)
        )(x, smem)


def _copy_rows(
    source: ir.Value,
    first: ir.Value,
    target: ir.Value,
    tile: SharedTile,
    num_rows: int,
    columns: int,
    source_rows: int,
    first_column: int,
) -> None:
    """Each thread copies 16 bytes at a time of `num_rows` rows from `first` on; 0 for rows that aren't."""
    words = ir.VectorType.get((4,), int32())
    source = address(source, int64())
    target = address(target, int32())
    per_copy = 16 // tile.dtype.itemsize
    per_row = columns // per_copy
    # Read anew at each row: else the compiler keeps the addresses of all copies through the loop over tiles.
    [thread] = asm([int32()], "mov.u32 $0, %tid.x;", "=r", [], has_side_effects=True)
    for start in range(0, num_rows * per_row, THREADS):
        # Where there are more threads than copies, several make the last one.
        copy = arith.minui(arith.addi(thread, i32(start)), i32(num_rows * per_row - 1))
        row, column = (op(copy, i32(per_row)) for op in (arith.divui, arith.remui))
        column = arith.muli(column, i32(per_copy))
        source_row = arith.addi(first, row)
        exists = arith.cmpi(arith.CmpIPredicate.ult, source_row, i32(source_rows))
        source_row = arith.minui(source_row, i32(source_rows - 1))
        at = arith.addi(arith.muli(source_row, i32(columns)), column)
        offset = arith.muli(arith.extui(int64(), at), utils.c(tile.dtype.itemsize, int64()))
        pointer = llvm.inttoptr(llvm.PointerType.get(1), arith.addi(source, offset))
        value = llvm.load(words, pointer, alignment=16)
        value = arith.select(exists, value, vector.broadcast(words, i32(0)))
        offset = offset_in(tile, row, arith.addi(column, i32(first_column)))
        pointer = llvm.inttoptr(llvm.PointerType.get(3), arith.addi(target, offset))
        llvm.store(value, pointer, alignment=16)


def _store_matrices(registers: Any, ref: ir.Value, tile: SharedTile) -> None:
    """Of [rows / 64, heads / 8, 2] registers, a warp has 8 rows of 8 heads in each."""
    lane, warp = lane_and_warp()
    base = address(ref, int32())
    half, head = (op(lane, i32(MATRIX)) for op in (arith.divui, arith.remui))
    half = arith.remui(half, i32(2))  # lanes from 16 on say nothing
    row = arith.addi(arith.muli(warp, i32(MMA_ROWS // NUM_WARPS)), arith.muli(half, i32(MATRIX)))
    for i, of_rows in enumerate(registers):
        first = arith.addi(base, offset_in(tile, head, arith.addi(row, i32(i * MMA_ROWS))))
        for j, pair in enumerate(of_rows):
            # Groups of 8 heads lie alike, wherever they are swizzled: one register addresses all.
            at = arith.addi(first, i32(j * MATRIX * tile.columns * tile.dtype.itemsize))
            asm(
                [],
                "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$0], {$1, $2};",
                "r,r,r,~{memory}",
                [at, *(utils.bitcast(word, int32()) for word in pair)],
                has_side_effects=True,
            )


def _store_words(registers: Any, ref: ir.Value, heads: int) -> None:
    """The same registers, of float32, to global memory [rows, heads]."""
    lane, warp = lane_and_warp()
    base = address(ref, int64())
    row = arith.addi(arith.muli(warp, i32(MMA_ROWS // NUM_WARPS)), arith.divui(lane, i32(4)))
    head = arith.muli(arith.remui(lane, i32(4)), i32(2))
    first = arith.extui(int64(), arith.addi(arith.muli(row, i32(heads)), head))
    first = arith.addi(base, arith.muli(first, utils.c(4, int64())))
    for i, of_rows in enumerate(registers):
        for j, pair in enumerate(of_rows):
            for half, values in enumerate(pair):
                # From one register: the compiler would keep as many addresses through the loop over tiles.
                offset = 4 * ((i * MMA_ROWS + half * MATRIX) * heads + j * MMA_COLUMNS)
                address_ = arith.addi(first, utils.c(offset, int64()))
                pointer = llvm.inttoptr(llvm.PointerType.get(1), address_)
                llvm.store(values, pointer, alignment=8)
