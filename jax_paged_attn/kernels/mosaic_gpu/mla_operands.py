"""The two products of latent attention by `wgmma`, with the twins that interpret mode needs."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .inline import address, asm, i32, int32, int64, offset_in
from .integers import div
from .layouts import LANES, NUM_WARPS, THREADS, WARP_ROWS, f32
from .mla_plan import BLOCK_KV, BLOCK_QUERIES, Plan
from .shared_tile import SWIZZLE_ROWS, SharedTile
from .wide_operands import MATRIX

LAYOUT = plgpu.Layout.WGMMA
OF_QUERIES, OF_KEYS = LAYOUT.reduce(1), LAYOUT.reduce(0)
LAST = 64  # columns of the queries' last block, which lies in shared memory


class Queries(NamedTuple):
    """A block of queries: columns in registers, [queries, half] and [queries, half - 64], the rest not."""

    first: jax.Array
    second: jax.Array | None
    last_smem: Any
    rope_smem: Any


@dataclasses.dataclass(frozen=True)
class LatentOperands:
    """What multiplies queries with latents, and weights with the same latents."""

    plan: Plan
    interpret: bool

    def load_queries(self, gmem: Any, last_smem: Any, rope_smem: Any) -> Queries:
        """Load the leading columns of queries [queries, rank] to registers."""
        half = self.plan.half
        first = plgpu.load(gmem.at[:, pl.ds(0, half)], layout=LAYOUT, optimized=False)
        second = None
        if half > LAST:
            columns = pl.ds(half, half - LAST)
            second = plgpu.load(gmem.at[:, columns], layout=LAYOUT, optimized=False)
        return Queries(first, second, last_smem, rope_smem)

    def scores(
        self,
        queries: Queries,
        halves: tuple[Any, Any],
        rope_smem: Any,
        wait: tuple[Callable[[], None], ...],
        meanwhile: Callable[[], None],
    ) -> jax.Array:
        """Q K^T, [queries, keys]; `wait` for each half and the rotated keys, `meanwhile` while it runs."""
        rest = self.plan.half - LAST
        products = [[(queries.first, halves[0])], [], [(queries.rope_smem, rope_smem)]]
        if queries.second is not None:
            products[1].append((queries.second, halves[1].at[:, pl.ds(0, rest)]))
        products[1].append((queries.last_smem, halves[1].at[:, pl.ds(rest, LAST)]))
        if self.interpret:
            total = jnp.zeros((BLOCK_QUERIES, BLOCK_KV), f32)
            for ready, group in zip(wait, products, strict=True):
                ready()
                for q, k_smem in group:
                    q = q if isinstance(q, jax.Array) else q[...]
                    total = total + jnp.dot(q, k_smem[...].T, preferred_element_type=f32)
            plgpu.commit_smem()  # unlike wgmma, these loads aren't known to be over
            meanwhile()
            return total

        def multiply(acc: Any) -> jax.Array:
            for ready, group in zip(wait, products, strict=True):
                ready()
                for q, k_smem in group:
                    plgpu.wgmma(acc, q, k_smem.transpose((1, 0)))
            meanwhile()
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((BLOCK_QUERIES, BLOCK_KV), f32))

    def add_values(
        self, acc: jax.Array, p_smem: Any, half_smem: Any, turn: Any, meanwhile: Callable[[], None]
    ) -> jax.Array:
        """acc [queries, half] + P V, when barrier `turn` lets it; `meanwhile` while it runs."""
        if self.interpret:
            plgpu.barrier_wait(turn)
            acc = acc + jnp.dot(p_smem[...], half_smem[...], preferred_element_type=f32)
            plgpu.commit_smem()
            meanwhile()
            return acc

        def multiply(ref: Any) -> None:
            plgpu.barrier_wait(turn)
            plgpu.wgmma(ref, p_smem, half_smem)
            meanwhile()

        return cast(jax.Array, pl.run_state(multiply)(plgpu.ACC.init(acc)))

    def store(self, values: jax.Array, smem: Any) -> None:
        """Store sums [queries, half], rounded, to swizzled rows."""
        values = values.astype(smem.dtype)
        if self.interpret:
            smem[...] = values
        else:
            tile = self.plan.tile(smem.shape[1])
            plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(tile.transforms)))(
                lambda _, x, ref: _store_matrices(x.registers.reshape(-1, 2, 2), ref, tile)
            )(values, smem)
        plgpu.commit_smem()

    def store_piece(self, acc: jax.Array, gmem: Any) -> None:
        """Store sums [queries, half] as they are to rows of whole latents in global memory."""
        if self.interpret:
            gmem[...] = acc
        else:
            rank = self.plan.problem.rank
            plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType()))(
                lambda _, x, ref: _store_pairs(x.registers.reshape(-1, 2), ref, rank)
            )(acc, gmem)

    def clear_rows(self, smem: Any, first: Any) -> None:
        """Put zeros into rows from `first` on: unused slots may hold NaN, and 0 * NaN is NaN."""
        if self.interpret:
            row = jnp.arange(smem.shape[0])[:, None]
            smem[...] = jnp.where(row < first, smem[...], jnp.zeros((), smem.dtype))
        else:
            tile, scalar = self.plan.tile(smem.shape[1]), plgpu.Layout.WG_SPLAT(())
            clear = plgpu.inline_mgpu(arg_types=(plgpu.RefType(tile.transforms), scalar, scalar))(
                lambda _, ref, first, step: _clear_words(
                    ref, first.registers.item(), step.registers.item(), tile
                )
            )
            # In a loop, and of a length that isn't known: addresses of all steps would take registers.
            per_row = tile.columns * tile.dtype.itemsize // 16
            steps = smem.shape[0] * per_row // THREADS
            lax.fori_loop(
                div(first * per_row, THREADS), steps, lambda step, _: clear(smem, first, step), None
            )
        plgpu.commit_smem()


def _lane_and_warp() -> tuple[ir.Value, ir.Value]:
    """Of this thread, asked anew.

    What nothing but the thread decides, such as where it writes, would else be computed once, before all
    loops, and take registers from then on.
    """
    (thread,) = asm([int32()], "mov.u32 $0, %tid.x;", "=r", [], has_side_effects=True)
    warp = arith.remui(arith.divui(thread, i32(LANES)), i32(NUM_WARPS))
    return arith.remui(thread, i32(LANES)), warp


def _store_pairs(registers: Any, ref: ir.Value, pitch: int) -> None:
    """Of [columns / 8, 2] registers, each of two neighbours; the second ones are 8 rows further down."""
    lane, warp = _lane_and_warp()
    row = arith.addi(arith.muli(warp, i32(WARP_ROWS)), arith.divui(lane, i32(4)))
    column = arith.muli(arith.remui(lane, i32(4)), i32(2))
    first = arith.muli(arith.addi(arith.muli(row, i32(pitch)), column), i32(4))
    base = arith.addi(address(ref, int64()), arith.extui(int64(), first))
    for i, halves in enumerate(registers):
        for half, values in enumerate(halves):
            at = utils.c(4 * (half * MATRIX * pitch + i * MATRIX), int64())
            llvm.store(values, llvm.inttoptr(llvm.PointerType.get(1), arith.addi(base, at)), alignment=8)


def _store_matrices(registers: Any, ref: ir.Value, tile: SharedTile) -> None:
    """Of [columns / 16, 2, 2] registers, each matrices of 8 x 8: neighbours in a row, and 8 rows apart."""
    base = address(ref, int32())
    lane, warp = _lane_and_warp()
    # A lane tells where one row of one of four matrices goes.
    row = arith.addi(arith.muli(warp, i32(WARP_ROWS)), arith.remui(lane, i32(WARP_ROWS)))
    column = arith.muli(arith.divui(lane, i32(WARP_ROWS)), i32(MATRIX))
    per_piece = tile.width // (2 * MATRIX)  # of which one follows another at the same places
    offsets = [offset_in(tile, row, arith.addi(column, i32(2 * MATRIX * i))) for i in range(per_piece)]
    for i, pairs in enumerate(registers):
        piece, at = divmod(i, per_piece)
        words = [utils.bitcast(word, int32()) for pair in pairs for word in pair]
        asm(
            [],
            f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0+{piece * SWIZZLE_ROWS * tile.row_bytes}], "
            "{$1, $2, $3, $4};",
            "r,r,r,r,r,~{memory}",
            [arith.addi(base, offsets[at]), *words],
            has_side_effects=True,
        )


def _clear_words(ref: ir.Value, first: ir.Value, step: ir.Value, tile: SharedTile) -> None:
    """Each thread clears 16 bytes, if they are of a row from `first` on."""
    base, per_row = address(ref, int32()), tile.columns * tile.dtype.itemsize // 16
    thread = arith.remui(utils.thread_idx(), i32(THREADS))
    word = arith.addi(thread, arith.muli(step, i32(THREADS)))
    row, column = (op(word, i32(per_row)) for op in (arith.divui, arith.remui))
    at = offset_in(tile, row, arith.muli(column, i32(16 // tile.dtype.itemsize)))
    asm(
        [],
        "{.reg .pred p; setp.ge.s32 p, $1, $2; @p st.shared.v4.b32 [$0], {$3, $3, $3, $3};}",
        "r,r,r,r,~{memory}",
        [arith.addi(base, at), row, first, i32(0)],
        has_side_effects=True,
    )
