"""Maxima and sums over the keys of a tile: first over those that a thread holds, then over all threads.

As the compiler reduces across warps, it takes several barriers, and registers for what all warps have to say.
This takes one barrier.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from .inline import FREE_BARRIER, address, array_of, asm, i32, int32, lane_and_warp, registers_of
from .layouts import MMA_COLUMNS, NUM_WARPS, THREADS, MatrixUnit, f32

# What is left of [keys, heads] when each thread has reduced its own: of each 8 heads 2 values a thread.
WARP_ROWS = 8
FOLDED_ROWS = NUM_WARPS * WARP_ROWS
FOLDED = plgpu.Layout.TILED(
    plgpu.Tiling(((FOLDED_ROWS, MMA_COLUMNS), (WARP_ROWS, MMA_COLUMNS), (2,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# Over an axis of an array, and of two values in MLIR.
OPS = {"max": (jnp.max, arith.maximumf), "sum": (jnp.sum, arith.addf)}


def fold(unit: MatrixUnit, x: jax.Array, op: str) -> jax.Array:
    """[keys, heads] -> [FOLDED_ROWS, heads]: "max" or "sum" of the keys that a thread holds."""
    shape = (FOLDED_ROWS, x.shape[1])
    if unit.interpret:
        of_threads = x.reshape(-1, NUM_WARPS, 2, WARP_ROWS, x.shape[1])
        return OPS[op][0](of_threads, axis=(0, 2)).reshape(shape)
    return plgpu.inline_mgpu(
        arg_types=(unit.acc,), return_type=plgpu.ShapeDtypeStruct(shape, f32, layout=FOLDED)
    )(lambda _, x: array_of(_folded(registers_of(x), OPS[op][1]), shape, FOLDED))(x)


def over_threads(unit: MatrixUnit, x: jax.Array, op: str, smem: Any) -> jax.Array:
    """[FOLDED_ROWS, heads] -> [heads]: "max" or "sum" over all threads, by way of `smem` [warps, heads].

    Before `smem` is used again, warps have to meet.
    """
    over_axis, combine = OPS[op]
    shape, layout = x.shape[1:], FOLDED.reduce(0)
    if unit.interpret:
        smem[...] = over_axis(x.reshape(NUM_WARPS, WARP_ROWS, *shape), axis=1)
        plgpu.commit_smem()
        return over_axis(smem[...], axis=0)
    return plgpu.inline_mgpu(
        arg_types=(FOLDED, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct(shape, f32, layout=layout)
    )(lambda _, x, ref: array_of(_over_threads(x.registers.ravel(), ref, combine), shape, layout))(x, smem)


def any_above(unit: MatrixUnit, x: jax.Array, limits: jax.Array) -> jax.Array:
    """Whether any value of [keys, heads] is above its head's limit."""
    if unit.interpret:
        return (x > limits).any()
    found = plgpu.inline_mgpu(
        arg_types=(unit.acc, unit.acc.reduce(0)),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )(lambda _, x, limits: _any_above(registers_of(x), limits.registers.ravel()))(x, limits)
    return found > 0


def _folded(registers: np.ndarray, combine: Any) -> np.ndarray:
    """Of [keys / 64, heads / 8, 2] registers, one for each 8 heads."""
    folded = np.empty(registers.shape[1], dtype=object)
    for i in range(len(folded)):
        folded[i] = functools.reduce(combine, registers[:, i].ravel())
    return folded


def _over_threads(registers: np.ndarray, ref: ir.Value, combine: Any) -> np.ndarray:
    """Of [heads / 8] registers, those of all threads combined, by way of [warps, heads]."""
    lane, warp = lane_and_warp()
    column = arith.muli(arith.remui(lane, i32(4)), i32(2))
    row_bytes = 4 * len(registers) * MMA_COLUMNS
    first = arith.addi(address(ref, int32()), arith.muli(column, i32(4)))
    own = arith.addi(first, arith.muli(warp, i32(row_bytes)))

    def pointer(base: ir.Value, offset: int) -> ir.Value:
        return llvm.inttoptr(llvm.PointerType.get(3), arith.addi(base, i32(offset)))

    for j, pair in enumerate(registers):
        for i in range(2):
            value = vector.extract(pair, [], [i])
            for distance in (4, 8, 16):
                value = combine(value, utils.shfl_bfly(value, distance))
            llvm.store(value, pointer(own, 4 * (j * MMA_COLUMNS + i)), alignment=4)
    utils.warpgroup_barrier()
    combined = np.empty_like(registers)
    for j, pair in enumerate(registers):
        of_warps = [
            llvm.load(pair.type, pointer(first, warp * row_bytes + 4 * j * MMA_COLUMNS), alignment=8)
            for warp in range(NUM_WARPS)
        ]
        combined[j] = functools.reduce(combine, of_warps)
    return combined


def _any_above(registers: np.ndarray, limits: np.ndarray) -> Any:
    """Whether any of [keys / 64, heads / 8, 2] registers of a warpgroup is above that of [heads / 8]."""
    above = [
        arith.cmpf(arith.CmpFPredicate.OGT, of_columns, limit)
        for limit, column in zip(limits, registers.swapaxes(0, 1), strict=True)
        for of_columns in column.ravel()
    ]
    pair = functools.reduce(arith.ori, above)
    first, second = (vector.extract(pair, [], [i]) for i in range(2))
    [found] = asm(
        [int32()],
        "{ .reg .pred any; setp.ne.b32 any, $1, 0;"
        f" barrier.cta.red.or.pred any, {FREE_BARRIER}, {THREADS}, any;"
        " selp.b32 $0, 1, 0, any; }",
        "=r,r",
        [arith.extui(int32(), arith.ori(first, second))],
        has_side_effects=True,
    )
    return fragmented_array.FragmentedArray.splat(found, (), is_signed=True)
