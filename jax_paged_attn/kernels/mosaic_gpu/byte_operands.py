"""Operands of the matrix unit from a cache of 1-byte values, which become float16 on their way.

Every value of float8_e4m3fn, float8_e5m2 and int8 is one of float16. Pallas has no register layout for what
is fast here, so the loads are written in MLIR and PTX, each beside a plain twin that interpret mode runs:

- `ldmatrix` moves pairs of bytes. A thread then holds other columns of head_dim than 2-byte values would give
  it. For keys that is as good, if the query's columns change places alike, since the product sums over them.
  Values leave the product with their columns exchanged, until `in_order` names them.
- Of a matrix that is loaded transposed, a register holds two keys of two columns; a permutation of its bytes
  tells them apart.
- One instruction makes two float16 of two bytes; for int8 a few do, on both at once.

A query of bfloat16 can lie outside of float16: each head is divided by a power of two first, which its scores
get back.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from .inline import address, array_of, asm, i32, int32, lane_and_warp, offset_in
from .layouts import MMA_COLUMNS, MMA_ROWS, NUM_WARPS, TURNED, TURNED_EXCHANGED, f32
from .operands import Operands
from .shared_tile import SharedTile

f16 = jnp.dtype(jnp.float16)
CHUNK = 16  # columns of a row of one 8 x 8 matrix, which are also the depth of one product
MATRICES = 4  # that one instruction loads
# Bytes of a word that become the first pair of float16, and those that become the second.
NEIGHBOURS, EVERY_OTHER = ((0, 1), (2, 3)), ((0, 2), (1, 3))
# Powers of two, as the bits of float32. A query's head is divided by that of its largest value less 2**14,
# which leaves float16 the most room for smaller ones; the quotient's power and its reciprocal are normal.
EXPONENT, RECIPROCAL, ROOM = 0x7F800000, 0x7F000000, 14 << 23
MIN_POWER, MAX_POWER = ROOM + 0x00800000, 0x7E800000


@dataclasses.dataclass(frozen=True)
class ByteOperands(Operands):
    """Operands from 1-byte caches; `q`, `k` and `v` describe what they are loaded from."""

    q: SharedTile
    k: SharedTile
    v: SharedTile

    def load_queries(self, smem: Any) -> tuple[jax.Array, jax.Array | None]:
        heads, columns = smem.shape
        if self.interpret:
            x = plgpu.load(smem, layout=self.rhs, optimized=False).astype(f32)
            largest = jax.lax.bitcast_convert_type(jnp.abs(x).max(axis=1), jnp.int32)
            power = jnp.clip(largest & EXPONENT, MIN_POWER, MAX_POWER) - ROOM
            power, inverse = (
                jax.lax.bitcast_convert_type(bits, f32) for bits in (power, jnp.int32(RECIPROCAL) - power)
            )
            return _exchange(x * inverse[:, None], (4, 2, 2)).T.astype(f16), power
        q, power = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(self.q.transforms),),
            return_type=(
                plgpu.ShapeDtypeStruct((columns, heads), f16, layout=self.rhs),
                plgpu.ShapeDtypeStruct((heads,), f32, layout=self.acc.reduce(0)),
            ),
        )(lambda _, ref: self._load_queries(ref, heads, columns))(smem)
        return q, power

    def load_keys(self, smem: Any) -> jax.Array:
        keys, columns = smem.shape
        if self.interpret:
            return _exchange(plgpu.load(smem, layout=self.lhs, optimized=False).astype(f16), (4, 2, 2))
        return plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(self.k.transforms),),
            return_type=plgpu.ShapeDtypeStruct((keys, columns), f16, layout=self.lhs),
        )(lambda _, ref: self._load_keys(ref, keys, columns))(smem)

    def load_values(self, smem: Any) -> jax.Array:
        keys, columns = smem.shape
        if self.interpret:
            return _exchange(plgpu.load(smem, layout=self.lhs, optimized=False).astype(f16), (8, 2, 1)).T
        return plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(self.v.transforms),),
            return_type=plgpu.ShapeDtypeStruct((columns, keys), f16, layout=self.lhs),
        )(lambda _, ref: self._load_values(ref, keys, columns))(smem)

    def in_order(self, turned: jax.Array) -> jax.Array:
        if self.interpret:
            return _exchange(turned, (2, 8, 1))
        return plgpu.inline_mgpu(
            arg_types=(TURNED,),
            return_type=plgpu.ShapeDtypeStruct(turned.shape, turned.dtype, layout=TURNED_EXCHANGED),
        )(lambda _, x: array_of(_moved(x.registers), turned.shape, TURNED_EXCHANGED))(turned)

    def _load_queries(self, ref: Any, heads: int, columns: int) -> tuple[Any, Any]:
        """Lane 4 n + t has the columns 4 t to 4 t + 3 of each chunk of head n."""
        lane, _ = lane_and_warp()
        quad, base = arith.remui(lane, i32(4)), utils.memref_ptr(ref)
        operands, powers = [], []
        for tile in range(heads // MMA_COLUMNS):
            head = arith.addi(arith.divui(lane, i32(4)), i32(tile * MMA_COLUMNS))
            values = []
            for first in range(0, columns, CHUNK):
                column = arith.addi(arith.muli(quad, i32(4)), i32(first))
                at = arith.muli(arith.addi(arith.muli(head, i32(columns)), column), i32(2))
                values += _load_floats(base, at, self.q.dtype)
            largest = values[0]
            for i, value in enumerate(values):
                magnitude = utils.bitcast(
                    arith.andi(utils.bitcast(value, int32()), i32(0x7FFFFFFF)), ir.F32Type.get()
                )
                largest = magnitude if i == 0 else arith.maximumf(largest, magnitude)
            for distance in (1, 2):
                largest = arith.maximumf(largest, utils.shfl_bfly(largest, distance))
            power = arith.andi(utils.bitcast(largest, int32()), i32(EXPONENT))
            power = arith.minsi(arith.maxsi(power, i32(MIN_POWER)), i32(MAX_POWER))
            power = arith.subi(power, i32(ROOM))
            inverse = utils.bitcast(arith.subi(i32(RECIPROCAL), power), ir.F32Type.get())
            values = [arith.mulf(value, inverse) for value in values]
            operands.append([_pack_f16(*pair) for pair in zip(values[::2], values[1::2], strict=True)])
            # Scores of heads 2 t and 2 t + 1 lie in lanes t, t + 4, ..
            pair = [
                utils.bitcast(
                    _from_lane(power, arith.addi(arith.muli(quad, i32(8)), i32(4 * i))), ir.F32Type.get()
                )
                for i in range(2)
            ]
            powers.append(vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), pair))
        registers = np.array(operands, object).reshape(heads // MMA_COLUMNS, columns // CHUNK, 2)
        return (
            array_of(registers.swapaxes(0, 1), (columns, heads), self.rhs),
            array_of(np.array(powers, object), (heads,), self.acc.reduce(0)),
        )

    def _load_keys(self, ref: Any, keys: int, columns: int) -> Any:
        lane, warp = lane_and_warp()
        matrix, row = arith.divui(lane, i32(8)), arith.remui(lane, i32(8))
        chunks = columns // CHUNK
        registers = np.empty((keys // MMA_ROWS, chunks, 2, 2), object)
        row = arith.addi(row, arith.muli(arith.remui(matrix, i32(2)), i32(8)))
        row = arith.addi(row, arith.muli(warp, i32(MMA_ROWS // NUM_WARPS)))
        for tile in range(keys // MMA_ROWS):
            for chunk in range(0, chunks, 2):
                # The last of an odd number comes twice.
                second = i32(min(chunk + 1, chunks - 1) - chunk)
                at = arith.addi(i32(chunk), arith.muli(arith.divui(matrix, i32(2)), second))
                column = arith.muli(at, i32(CHUNK))
                offset = offset_in(self.k, arith.addi(row, i32(tile * MMA_ROWS)), column)
                words = _load_matrices(ref, offset, transposed=False)
                for i, word in enumerate(words):
                    if chunk + i // 2 < chunks:
                        pairs = _to_f16(word, self.k.dtype, NEIGHBOURS)
                        registers[tile, chunk + i // 2, :, i % 2] = pairs
        return array_of(registers, (keys, columns), self.lhs)

    def _load_values(self, ref: Any, keys: int, columns: int) -> Any:
        lane, warp = lane_and_warp()
        registers = np.empty((columns // MMA_ROWS, keys // CHUNK, 2, 2), object)
        for tile in range(columns // MMA_ROWS):
            column = arith.addi(arith.muli(warp, i32(CHUNK)), i32(tile * MMA_ROWS))
            for key in range(0, keys, 8 * MATRICES):
                offset = offset_in(self.v, arith.addi(lane, i32(key)), column)
                words = _load_matrices(ref, offset, transposed=True)
                for i, word in enumerate(words):
                    pairs = _to_f16(word, self.v.dtype, EVERY_OTHER)
                    registers[tile, key // CHUNK + i // 2, i % 2] = pairs
        return array_of(registers, (columns, keys), self.lhs)


def _exchange(x: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    """Exchange the first two axes of the chunks of x's last axis, seen as `shape`."""
    chunks = x.reshape(*x.shape[:-1], x.shape[-1] // CHUNK, *shape)
    return chunks.swapaxes(-3, -2).reshape(x.shape)


def _moved(registers: np.ndarray) -> np.ndarray:
    """The same float32 by other names: registers that kept theirs would keep their layout."""
    single = ir.F32Type.get()
    moved = np.empty_like(registers)
    for at, register in np.ndenumerate(registers):
        [value] = asm([single], "mov.b32 $0, $1;", "=f,f", [vector.extract(register, [], [0])])
        moved[at] = vector.from_elements(register.type, [value])
    return moved


def _load_matrices(ref: ir.Value, offset: ir.Value, *, transposed: bool) -> list[ir.Value]:
    """Four matrices of 8 x 8 pairs of bytes; lane l gives the place of row l % 8 of matrix l / 8."""
    at = arith.addi(address(ref, int32()), offset)
    trans = ".trans" if transposed else ""
    return asm(
        [int32()] * MATRICES,
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        "=r,=r,=r,=r,r,~{memory}",
        [at],
        has_side_effects=True,
    )


def _load_floats(base: ir.Value, offset: ir.Value, dtype: Any) -> list[ir.Value]:
    """Four neighbouring 2-byte values, as float32."""
    byte, single = ir.IntegerType.get_signless(8), ir.F32Type.get()
    element = ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
    loaded = llvm.load(
        ir.VectorType.get((4,), element), utils.getelementptr(base, [offset], byte), alignment=8
    )
    wide = arith.extf(ir.VectorType.get((4,), single), loaded)
    return [vector.extract(wide, [], [i]) for i in range(4)]


def _pack_f16(low: ir.Value, high: ir.Value) -> ir.Value:
    [pair] = asm([int32()], "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high])
    return utils.bitcast(pair, ir.VectorType.get((2,), ir.F16Type.get()))


def _from_lane(value: ir.Value, lane: ir.Value) -> ir.Value:
    [found] = asm(
        [int32()],
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
        "=r,r,r",
        [value, lane],
        has_side_effects=True,
    )
    return found


def _permute(a: ir.Value, b: ir.Value, source_bytes: tuple[int, int, int, int]) -> ir.Value:
    """The word of these bytes, lowest first, of the 8 of a and b."""
    selector = sum(source << (4 * i) for i, source in enumerate(source_bytes))
    [word] = asm([int32()], f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r", [a, b])
    return word


def _to_f16(word: ir.Value, dtype: Any, pairs: tuple[tuple[int, int], ...]) -> list[ir.Value]:
    """Two registers of two float16, of the pairs of a word's bytes."""
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    match dtype.name:
        case "float8_e4m3fn":
            (a, b), (c, d) = pairs
            if pairs != NEIGHBOURS:
                word = _permute(word, word, (a, b, c, d))
            code = "{.reg .b16 a, b; mov.b32 {a, b}, $2;"
            code += " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}"
            return [utils.bitcast(x, pair) for x in asm([int32()] * 2, code, "=r,=r,r", [word])]
        case "float8_e5m2":  # the upper half of float16
            return [utils.bitcast(_permute(word, i32(0), (4, a, 4, b)), pair) for a, b in pairs]
        case "int8":  # 0x64 over a byte x + 128 is the float16 of 1024 + 128 + x
            word = arith.xori(word, utils.c(-0x7F7F7F80, int32()))
            offset = vector.broadcast(pair, utils.c(1152.0, ir.F16Type.get()))
            return [
                arith.subf(utils.bitcast(_permute(word, i32(0x64646464), (a, 4, b, 4)), pair), offset)
                for a, b in pairs
            ]
    raise AssertionError(dtype)
