"""The kernel of latent attention for Hopper: `wgmma`, three warpgroups a thread block.

Block (part, block) walks part `part` of the list of (row, tile) for 64 queries of each row. Its third
warpgroup multiplies queries with latents, does the softmax, and passes weights on through shared memory; each
of the other two multiplies them with its half of the latents' columns, whose sums it holds in registers. So a
latent comes to shared memory once, and is multiplied twice.

The order on the matrix unit is Q K(i + 1), P V(i), Q K(i + 2), ..: P V(i) has its turn when Q K(i + 1) is
done, and runs under the softmax of tile i + 1.

`schedule.py` says which tiles, `mla_loading.py` copies them, `mla_operands.py` has the products,
`mla_merge.py` combines the pieces of rows that the ends of parts cut.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .integers import div, round_up
from .layouts import along_columns, along_rows, f32, full
from .mla_loading import LatentLoader, slot_of
from .mla_operands import LAST, LAYOUT, OF_KEYS, OF_QUERIES, LatentOperands
from .mla_plan import BLOCK_KV, BLOCK_QUERIES, RING_TILES, VALUE_WARPGROUPS, Plan
from .page_loading import next_tile
from .rows import BatchRows, Row, SearchedRows, Table
from .schedule import BalancedCuts, Run
from .shared_tile import SWIZZLE_ROWS
from .softmax import LN_2, LOG2_E, LOWEST
from .window import Window

i32 = jnp.int32
# Of the 168 registers a thread that three warpgroups are launched with, the one with the queries takes more.
VALUE_REGISTERS, SCORE_REGISTERS = 160, 184
# Rows of "stats": what earlier sums are multiplied by; at a row's end what the output is multiplied by, and
# the lse; or, of a piece of a row, the sum of its weights and their greatest score.
RESCALE, FACTOR_OR_SUM, LSE_OR_MAX = range(3)
# Entries of "run": which tiles are the block's, and which block it is.
ROW, FIRST_TILE, NUM_TILES, TOTAL, PART, BLOCK = range(6)


def launch(
    plan: Plan,
    q_nope: jax.Array,
    q_pe: jax.Array,
    latent_pages: jax.Array,
    rope_pages: jax.Array,
    table: Table,
    sm_scale: jax.Array,
    *,
    interpret: Any,
) -> dict[str, jax.Array]:
    """Launch the kernel, of queries [batch, whole blocks of them, columns].

    Returns
    -------
    dict
        "out" [batch, queries in whole groups of 8, rank] and (with return_lse) "lse" [batch, queries in whole
        blocks] of the rows that lie in one part, and for the merge: "acc" and "max_sum" of row pieces, and
        "cut_rows" as in the decode kernel.
    """
    p, schedule = plan.problem, plan.schedule
    table_arrays = table.arrays()
    operands = [q_nope, q_pe, latent_pages, rope_pages, *table_arrays.values(), sm_scale]
    # Copies out of swizzled rows go to arrays of whole groups of them.
    out_rows = round_up(p.queries, SWIZZLE_ROWS)
    out_types = {"out": jax.ShapeDtypeStruct((p.batch, out_rows, p.rank), p.dtype)}
    if p.return_lse:
        out_types["lse"] = jax.ShapeDtypeStruct((p.batch, plan.queries), f32)
    out_types |= {name: jax.ShapeDtypeStruct(shape, f32) for name, shape in plan.partial_shapes().items()}
    if schedule.cuts_rows:
        out_types["cut_rows"] = jax.ShapeDtypeStruct((schedule.num_cut_rows, 3), i32)

    def body(*args, **scratch):
        names = ("q_nope", "q_pe", "latents", "rope", *table_arrays, "sm_scale", *out_types)
        refs = dict(zip((f"{name}_gmem" for name in names), args, strict=True))
        refs["latents_smem"], (rows_smem, sums_smem) = scratch.pop("latents_or_rows")
        refs |= {"rows_smem": rows_smem, "sums_smem": sums_smem} | scratch
        block = _Block(plan, table._replace(**{name: refs[f"{name}_gmem"] for name in table_arrays}), refs)
        block.operands = LatentOperands(plan, interpret is not None)
        warpgroup = lax.axis_index("warpgroup")
        for half in range(VALUE_WARPGROUPS):

            @pl.when(warpgroup == half)
            def _(half=half):
                block.set_registers(VALUE_REGISTERS, "decrease")
                _multiply_values(block, half)

        @pl.when(warpgroup == VALUE_WARPGROUPS)
        def _():
            block.set_registers(SCORE_REGISTERS, "increase")
            _multiply_keys(block)

    outs = plgpu.kernel(
        body,
        grid=(schedule.parts, plan.blocks),
        grid_names=("part", "block"),
        num_threads=VALUE_WARPGROUPS + 1,
        thread_name="warpgroup",
        out_type=list(out_types.values()),
        scratch_types=plan.scratch_types(),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        kernel_name="paged_mla_decode",
        interpret=interpret,
    )(*operands)
    return dict(zip(out_types, outs, strict=True))


class _KnownRows(BatchRows):
    """Rows of which one warpgroup has counted the tiles already."""

    def __init__(self, table: Table, plan: Plan, total: Any):
        super().__init__(table, plan.tiling, plan.problem.batch, Window())
        self.known_total = total

    def total(self):
        return self.known_total


class _Block:
    """What a thread block's warpgroups share.

    What is needed once a row is read again from shared memory: kept, it would take registers, of which there
    are none to spare.
    """

    operands: LatentOperands

    def __init__(self, plan: Plan, table: Table, refs: dict[str, Any]):
        self.plan, self.table, self.refs = plan, table, refs
        self.rows = BatchRows(table, plan.tiling, plan.problem.batch, Window())

    def read(self, name: int) -> Any:
        """Read an entry of "run"."""
        return self.refs["run_smem"][name]

    @property
    def part(self) -> Any:
        return self.read(PART)

    @property
    def block(self) -> Any:
        return self.read(BLOCK)

    def exists(self, tile: Any) -> Any:
        """Whether the part has a `tile`-th tile."""
        return tile < self.read(NUM_TILES)

    def range(self, row: Row, step: Any) -> tuple[Any, Any]:
        """Which tiles of a row are the part's, of which the first is its `step`-th: [begin, end)."""
        begin = jnp.where(step == 0, self.read(FIRST_TILE), 0)
        return begin, jnp.minimum(begin + (self.read(NUM_TILES) - step), row.end_tile)

    def begins(self, row: Row) -> Any:
        """Whether the part has the first tile of a row of which it has some."""
        return (row.index != self.read(ROW)) | (self.read(FIRST_TILE) == 0)

    def whole(self, row: Row, end: Any) -> Any:
        """Whether the part has all of a row, of which it has tiles up to `end`."""
        return self.begins(row) & (end == row.end_tile) if self.plan.schedule.cuts_rows else True

    def piece(self, row: Row) -> tuple[Any, Any, Any]:
        """Where the partial results of a row go."""
        return self.part, jnp.where(self.begins(row), self.plan.schedule.sides - 1, 0), self.block

    def set_registers(self, count: int, action: Any) -> None:
        if not self.operands.interpret:
            plgpu.set_max_registers(count, action=action)

    def at(self, name: str, row: Row) -> Any:
        """The block's queries of a row in an array [batch, queries, ..]."""
        return self.refs[f"{name}_gmem"].at[row.index, pl.ds(self.block * BLOCK_QUERIES, BLOCK_QUERIES)]

    def find_run(self) -> None:
        """Find out which tiles are the part's, for all warpgroups."""
        plan, refs = self.plan, self.refs
        rows = self.rows
        if plan.vector_rows:
            memory = (refs["rows_smem"], refs["sums_smem"], refs["rows_ready"])
            rows = SearchedRows(self.table, plan.tiling, plan.problem.batch, *memory, Window())
        cuts = plan.schedule.cuts(rows)
        part = lax.axis_index("part")
        run = cuts.run(part)
        values = {ROW: run.row.index, FIRST_TILE: run.first_tile, NUM_TILES: run.num_tiles}
        values |= {PART: part, BLOCK: lax.axis_index("block")}
        values[TOTAL] = cuts.total if isinstance(cuts, BalancedCuts) else i32(0)
        for i, value in values.items():
            refs["run_smem"][i] = value
        plgpu.commit_smem()  # and nobody needs the rows any more
        plgpu.barrier_arrive(refs["run_ready"])

    def run(self) -> Run:
        """Read what `find_run` has found."""
        plgpu.barrier_wait(self.refs["run_ready"])
        return Run(self.rows.row(self.read(ROW)), self.read(FIRST_TILE), self.read(NUM_TILES))

    def followers(self, row: Row, step: Any) -> Any:
        """How many later parts go on with `row`, which begins with the part's `step`-th tile."""
        cuts = self.plan.schedule.cuts(_KnownRows(self.table, self.plan, self.read(TOTAL)))
        return cuts.followers(self.part, row, step)

    def keys_of(self, row: Row, tile: Any) -> tuple[Any, Any]:
        """(position of a tile's first key, how many of the tile's rows are keys, all of them its first)."""
        tiling = self.plan.tiling
        position, _ = tiling.position_of(tile, i32(0))
        most = tiling.keys_per_tile
        if tiling.tiles_per_page > 1:
            most = jnp.minimum(most, tiling.page_size - tiling.block_in_page(tile) * BLOCK_KV)
        return position, jnp.clip(row.kv_len - position, 0, most)


class _Scores(NamedTuple):
    """A tile's weights, and what the softmax has come to with them."""

    p: jax.Array
    rescale: jax.Array
    max_log2: jax.Array
    weight_sum: jax.Array


def _multiply_keys(block: _Block) -> None:
    """The third warpgroup: scores, softmax, weights."""
    plan, refs, unit = block.plan, block.refs, block.operands
    p, tiling = plan.problem, plan.tiling
    block.find_run()
    run = block.run()
    scale_log2 = refs["sm_scale_gmem"][0] * f32(LOG2_E)

    def softmax(scores, row, tile, max_log2, weight_sum):
        scores = scores * scale_log2
        first_masked = i32(0)
        if tiling.dense:  # only the tiles at the end of what some query sees need a mask
            seen = row.kv_len - (p.q_len - 1) if p.causal else row.kv_len
            first_masked = tiling.tile_of(jnp.maximum(seen, 0))

        def mask(scores):
            position, keys = block.keys_of(row, tile)
            key = along_rows(plgpu.broadcasted_iota(i32, (BLOCK_KV,), 0, layout=OF_KEYS), scores.shape)
            if p.causal and p.q_len > 1:
                query = plgpu.broadcasted_iota(i32, (BLOCK_QUERIES,), 0, layout=OF_QUERIES)
                token = div(query + block.block * BLOCK_QUERIES, p.num_heads)
                end = jnp.minimum(token + (row.kv_len - (p.q_len - 1) - position), keys)
                valid = key < along_columns(end, scores.shape)
            else:
                valid = key < keys
            return jnp.where(valid, scores, f32(-np.inf))

        scores = lax.cond(tile >= first_masked, mask, lambda scores: scores, scores)
        new_max = jnp.maximum(max_log2, scores.max(axis=1))  # finite, as LOWEST is
        rescale = jnp.exp2(max_log2 - new_max)
        weights = jnp.exp2(scores - along_columns(new_max, scores.shape))
        weight_sum = weight_sum * rescale + weights.sum(axis=1)
        return _Scores(weights.astype(p.dtype), rescale, new_max, weight_sum)

    def publish(step, scores: _Scores, whole: Any = None):
        """Hand a tile's weights over, once those of the tile before have been used.

        Of the last one of a row, `whole` says whether the part has all of it.
        """
        pl.when(step > 0)(lambda: plgpu.barrier_wait(refs["p_consumed"]))
        refs["p_smem"][...] = scores.p
        stats = refs["stats_smem"]
        stats[RESCALE] = scores.rescale
        if whole is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # those of the row before have left

            def of_row():
                empty = scores.weight_sum == 0
                weight_sum = jnp.where(empty, f32(1), scores.weight_sum)
                lse = (scores.max_log2 + jnp.log2(weight_sum)) * f32(LN_2)
                return 1.0 / weight_sum, jnp.where(empty, f32(-np.inf), lse)

            def of_piece():
                return scores.weight_sum, scores.max_log2

            stats[FACTOR_OR_SUM], stats[LSE_OR_MAX] = lax.cond(whole, of_row, of_piece)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["p_ready"])

    def attend_row(carry):
        b, step = carry
        row = block.rows.row(b)
        begin, end = block.range(row, step)
        q_nope = block.at("q_nope", row)
        for columns, name in ((pl.ds(p.rank - LAST, LAST), "last"), (None, "rope")):
            source = q_nope.at[:, columns] if columns else block.at("q_pe", row)
            plgpu.copy_gmem_to_smem(source, refs[f"q_{name}_smem"], refs["q_ready"])
        queries = unit.load_queries(q_nope, refs["q_last_smem"], refs["q_rope_smem"])
        plgpu.barrier_wait(refs["q_ready"])

        def multiply(step, meanwhile):
            slots = [slot_of(step, half) for half in range(VALUE_WARPGROUPS)]
            waits = [refs["latents_ready"].at[slot] for slot in slots] + [refs["rope_ready"]]
            return unit.scores(
                queries,
                tuple(refs["latents_smem"].at[slot] for slot in slots),
                refs["rope_smem"],
                tuple(lambda ready=ready: plgpu.barrier_wait(ready) for ready in waits),
                meanwhile,
            )

        scores = multiply(step, lambda: None)
        plgpu.barrier_arrive(refs["row_begun"])
        lowest, zeros = (full((BLOCK_QUERIES,), value, OF_QUERIES) for value in (LOWEST, 0))
        state = softmax(scores, row, begin, lowest, zeros)

        def attend_tile(tile, carry):
            step, state = carry
            scores = multiply(step + 1, lambda: publish(step, state))
            plgpu.barrier_arrive(refs["p_turn"])
            return step + 1, softmax(scores, row, tile, state.max_log2, state.weight_sum)

        step, state = lax.fori_loop(begin + 1, end, attend_tile, (step, state))
        row = block.rows.row(b)  # read again rather than kept in registers
        publish(step, state, block.whole(row, end))
        plgpu.barrier_arrive(refs["p_turn"])
        _store_stats(block, row, end, step)
        return b + 1, step + 1

    if plan.schedule.cuts_rows and not plan.schedule.cut_row_of_each_row:

        @pl.when(block.block == 0)
        def _():
            refs["cut_rows_gmem"][block.part, 0] = i32(0)

    lax.while_loop(lambda carry: block.exists(carry[1]), attend_row, (run.row.index, i32(0)))
    pl.when(run.num_tiles > 0)(lambda: plgpu.barrier_wait(refs["p_consumed"]))
    plgpu.wait_smem_to_gmem(0)


class _Walk(NamedTuple):
    """How far a warpgroup's copies of latents are: the tile that comes next."""

    row: Row
    tile: Any


def _multiply_values(block: _Block, half: int) -> None:
    """One of the first two warpgroups: brings half of the columns, multiplies weights with them, writes."""
    plan, refs, unit = block.plan, block.refs, block.operands
    tiling = plan.tiling
    run = block.run()
    loads_rope = half == 0  # for both
    loader = LatentLoader(
        plan,
        half,
        refs["indices_gmem"],
        refs["latents_gmem"],
        refs["rope_gmem"],
        refs["latents_smem"],
        refs["rope_smem"],
        refs["latents_ready"],
        refs["rope_ready"],
        refs["run_smem"],
    )

    def load_rope(tile: Any) -> None:
        """Bring the rotated keys of the part's `tile`-th tile, if that is for this warpgroup to do."""
        if loads_rope:
            pl.when(block.exists(tile))(lambda: loader.load_rope(tile))

    def load_rope_after(tile: Any) -> None:
        """The same for the tile after `tile`, with which a row begins, when that has been read."""
        if loads_rope:
            pl.when(block.exists(tile))(lambda: plgpu.barrier_wait(refs["row_begun"]))
            load_rope(tile + 1)

    def start() -> _Walk:
        walk = _Walk(run.row, run.first_tile)
        for tile in map(i32, range(RING_TILES)):
            loader.look_up(walk.row, walk.tile, tile)
            walk = _Walk(*next_tile(walk.row, walk.tile, block.rows))
        plgpu.commit_smem()
        for tile in map(i32, range(RING_TILES)):
            pl.when(block.exists(tile))(lambda tile=tile: loader.load_latents(tile))
        load_rope(i32(0))
        load_rope_after(i32(0))
        return walk

    def load_next(walk: _Walk, step: Any) -> _Walk:
        """Bring the latents that come into the slot of tile `step`, which is free."""
        plgpu.commit_smem()  # all warps are done with it
        pl.when(block.exists(step + RING_TILES))(lambda: loader.load_latents(step + RING_TILES))
        return _Walk(*next_tile(walk.row, walk.tile, block.rows))

    def add_tile(acc, row, tile, step, walk, last):
        slot = refs["latents_smem"].at[slot_of(step, half)]
        plgpu.barrier_wait(refs["p_ready"])
        rescale = plgpu.load(refs["stats_smem"].at[RESCALE], layout=OF_QUERIES, optimized=False)
        acc = acc * along_columns(rescale, acc.shape)
        _, keys = block.keys_of(row, tile)
        if last or not tiling.dense:
            pl.when(keys < BLOCK_KV)(lambda: unit.clear_rows(slot, keys))

        def meanwhile():
            if not last:  # Q K of the next tile is done, and the rotated keys after that can come
                load_rope(step + 2)
            loader.look_up(walk.row, walk.tile, step + RING_TILES)

        return unit.add_values(acc, refs["p_smem"], slot, refs["p_turn"], meanwhile)

    def attend_tile(row, tile, carry):
        """A tile that is not the last of its row, or of the part."""
        acc, step, walk = carry
        acc = add_tile(acc, row, tile, step, walk, last=False)
        plgpu.barrier_arrive(refs["p_consumed"])
        return acc, step + 1, load_next(walk, step)

    def attend_row(carry):
        b, step, walk = carry
        row = block.rows.row(b)
        begin, end = block.range(row, step)
        acc = full((BLOCK_QUERIES, plan.half), 0, LAYOUT)
        carry = (acc, step, walk)
        carry = lax.fori_loop(begin, end - 1, lambda tile, c: attend_tile(row, tile, c), carry)
        acc, step, walk = carry
        row = block.rows.row(b)  # read again rather than kept in registers
        acc = add_tile(acc, row, end - 1, step, walk, last=True)
        slot = refs["latents_smem"].at[slot_of(step, half)]
        _store(block, half, row, end, acc, slot)
        load_rope_after(step + 1)
        return b + 1, step + 1, load_next(walk, step)

    lax.while_loop(
        lambda carry: block.exists(carry[1]),
        attend_row,
        (run.row.index, i32(0), start()),
    )
    plgpu.wait_smem_to_gmem(0)


def _store(
    block: _Block,
    half: int,
    row: Row,
    end: Any,
    acc: jax.Array,
    slot: Any,
) -> None:
    """Write a row, or the piece of it that the part has; `slot` is free for what goes out through it."""
    plan, refs = block.plan, block.refs
    schedule = plan.schedule
    columns = pl.ds(half * plan.half, plan.half)
    whole = block.whole(row, end)
    factor = plgpu.load(refs["stats_smem"].at[FACTOR_OR_SUM], layout=OF_QUERIES, optimized=False)
    if schedule.cuts_rows:

        @pl.when(jnp.logical_not(whole))
        def _():
            piece = refs["acc_gmem"].at[(*block.piece(row), slice(None), columns)]
            block.operands.store_piece(acc, piece)

    plgpu.commit_smem()  # all warps have read, and are done with the slot
    plgpu.barrier_arrive(refs["p_consumed"])

    @pl.when(whole)
    def _():
        block.operands.store(acc * along_columns(factor, acc.shape), slot)
        # What lies past the array is dropped.
        plgpu.copy_smem_to_gmem(slot, block.at("out", row).at[:, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_stats(block: _Block, row: Row, end: Any, last_step: Any) -> None:
    """Begin to write what a row has besides its output, and list it if later parts go on with it."""
    schedule, refs = block.plan.schedule, block.refs
    stats, begins, whole = refs["stats_smem"], block.begins(row), block.whole(row, end)
    if block.plan.problem.return_lse:

        @pl.when(whole)
        def _():
            plgpu.copy_smem_to_gmem(stats.at[LSE_OR_MAX], block.at("lse", row))

    if not schedule.cuts_rows:
        return

    @pl.when(jnp.logical_not(whole))
    def _():
        for i, name in enumerate((LSE_OR_MAX, FACTOR_OR_SUM)):
            plgpu.copy_smem_to_gmem(stats.at[name], refs["max_sum_gmem"].at[(*block.piece(row), i)])

    entry = row.index if schedule.cut_row_of_each_row else block.part

    def record(followers):
        for i, value in enumerate((followers, block.part, row.index)):
            refs["cut_rows_gmem"][entry, i] = value

    once = block.block == 0  # and not for each block of queries
    pl.when(begins & once & jnp.logical_not(whole))(
        lambda: record(block.followers(row, last_step + 1 - end))  # the row has tiles 0 to `end` here
    )
    if schedule.cut_row_of_each_row:
        pl.when(whole & once)(lambda: record(i32(0)))
