"""What the pieces that are written in MLIR and PTX have in common."""

import dataclasses
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .layouts import LANES, MMA_COLUMNS, NUM_WARPS
from .shared_tile import MAX_SWIZZLE, SWIZZLE_ROWS, SharedTile

FREE_BARRIER = 8  # of the 16 in hardware; the compiler's own have the lowest numbers


def int32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i32(value: int) -> ir.Value:
    return utils.c(value, int32())


def int64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def asm(
    results: list[ir.Type], code: str, constraints: str, operands: list[ir.Value], **kwargs: Any
) -> list[Any]:
    """PTX; gives the list of its results.

    Instructions of a whole warp, such as ldmatrix, need all control flow around them to be uniform in it, as
    the tile and row loops are.
    """
    if len(results) <= 1:
        result = llvm.inline_asm(results[0] if results else None, operands, code, constraints, **kwargs)
        return [result] if results else []
    struct = llvm.inline_asm(llvm.StructType.get_literal(results), operands, code, constraints, **kwargs)
    return [llvm.extractvalue(result, struct, [i]) for i, result in enumerate(results)]


def read_only() -> plgpu.RefType:
    """The type of a ref that inlined code does not write: jax 0.12.1 wants to know, of a kernel's inputs."""
    says = any(field.name == "write" for field in dataclasses.fields(plgpu.RefType))
    options: dict[str, Any] = {"write": False} if says else {}
    return plgpu.RefType(**options)


def address(ref: ir.Value, type_: ir.Type) -> ir.Value:
    """Where a ref begins: of 32 bits in shared memory, of 64 in global memory."""
    return llvm.ptrtoint(type_, utils.memref_ptr(ref))


def registers_of(acc: Any) -> np.ndarray:
    """Of a product [rows, columns], as [rows / 64, columns / 8, 2]: a warp has 8 rows of 8 columns each."""
    return acc.registers.reshape(-1, acc.shape[1] // MMA_COLUMNS, 2)


def array_of(
    registers: np.ndarray, shape: tuple[int, ...], layout: Any, is_signed: bool | None = None
) -> fragmented_array.FragmentedArray:
    """An array of these registers, in the order that `layout` counts them in."""
    layout = layout.to_mgpu()
    return fragmented_array.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=is_signed
    )


def meet(threads: int) -> None:
    """Wait for so many threads, and for what they have done to shared memory; not for asynchronous copies."""
    asm([], f"barrier.cta.sync {FREE_BARRIER}, {threads};", "~{memory}", [], has_side_effects=True)


def lane_and_warp() -> tuple[ir.Value, ir.Value]:
    """Of this thread, in its warpgroup."""
    thread = utils.thread_idx()
    warp = arith.remui(arith.divui(thread, i32(LANES)), i32(NUM_WARPS))
    return arith.remui(thread, i32(LANES)), warp


def offset_in(tile: SharedTile, row: ir.Value, column: ir.Value) -> ir.Value:
    """Byte at which a row's 16 bytes from `column` on begin."""
    rows = SWIZZLE_ROWS if tile.swizzled else 1
    piece, in_piece = (op(column, i32(tile.width)) for op in (arith.divui, arith.remui))
    group, in_group = (op(row, i32(rows)) for op in (arith.divui, arith.remui))
    piece = arith.addi(arith.muli(group, i32(tile.columns // tile.width)), piece)
    row = arith.addi(arith.muli(piece, i32(rows)), in_group)
    column = arith.muli(in_piece, i32(tile.dtype.itemsize))
    offset = arith.addi(arith.muli(row, i32(tile.row_bytes)), column)
    if len(tile.transforms) == 1:
        return offset
    # Swizzled, the 16 bytes change places by the 128 bytes that they lie in.
    line = arith.remui(arith.divui(offset, i32(MAX_SWIZZLE)), i32(tile.row_bytes // 16))
    return arith.xori(offset, arith.muli(line, i32(16)))
