"""The append kernel: new tokens go through shared memory into their slots of the pools, in place.

Each warpgroup of a block walks over tiles of a few tokens. While the first ones come, the block finds out
which of its tokens a later one overwrites (`equal_slots.py`). Then each tile's rows are rotated and rounded
where asked (`token_rows.py`), and each token's heads sent off in one copy for K and one for V, while other
tiles come and go.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn.calls.append import Operands

from .append_plan import COPY_VALUES, Plan
from .integers import div, rem
from .layouts import along_columns, along_rows, f32
from .token_rows import convert_columns, rotate_halves

i32 = jnp.int32


def launch(
    plan: Plan, operands: Operands, pools: dict[str, Any], q_out: jax.Array | None, *, interpret: Any
) -> jax.Array | None:
    """Launch the kernel, which updates the refs `pools`.

    If there is a q, returns it rotated: in `q_out`, which keeps the other tokens, or in a new array.
    """
    p, rotation = plan.problem, plan.problem.rotation
    x = operands
    inputs: dict[str, Any] = {
        "slots": x.slots,
        "k": x.k_new.reshape(p.num_tokens * p.num_kv_heads, p.head_dim),
        "v": x.v_new.reshape(p.num_tokens * p.num_kv_heads, p.v_head_dim),
    }
    for name, scale in (("k", x.k_scale), ("v", x.v_scale)):
        if scale is not None:
            inputs[f"{name}_scale"] = scale.reshape(-1)
    outs, refs_out = {}, dict(pools)
    if x.rotation is not None:
        inputs["q"] = x.rotation.q.reshape(-1, p.head_dim)
        inputs["positions"], inputs["frequencies"] = x.rotation.positions, x.rotation.frequencies
        if q_out is None:
            outs["q_out"] = jax.ShapeDtypeStruct(inputs["q"].shape, p.dtype)
        else:
            refs_out["q_out"] = jax.new_ref(q_out.reshape(inputs["q"].shape))

    def body(*args, **scratch):
        names = [f"{name}_gmem" for name in (*inputs, *refs_out, *outs)]
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        refs = dict(zip(names, args, strict=True)) | scratch
        _walk(plan, block, warpgroup, refs, interpret=interpret is not None)

    results = plgpu.kernel(
        body,
        out_type=list(outs.values()),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=plan.config.warpgroups,
        thread_name="warpgroup",
        scratch_types=plan.scratch_types(),
        # Shared memory passes between warps at the commit_smem() calls alone.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="append_kv",
        interpret=interpret,
    )(*inputs.values(), *refs_out.values())
    if rotation is None:
        return None
    rotated = results[0] if outs else jax.freeze(refs_out["q_out"])
    return rotated.reshape(p.num_tokens, rotation.num_q_heads, p.head_dim)


def _walk(plan: Plan, block: Any, warpgroup: Any, refs: dict[str, Any], *, interpret: bool) -> None:
    """Bring and write each tile of a warpgroup; those of a block's warpgroups alternate."""
    warpgroups = plan.config.warpgroups
    begin, end = (div(part * plan.tiles, plan.blocks) for part in (block, block + 1))
    first = begin + warpgroup

    stages = plan.config.num_stages

    own, of_stage = plan.warpgroup_scratch(), plan.stage_scratch()
    refs = {name: ref.at[warpgroup] if name in own else ref for name, ref in refs.items()}

    def at_turn(turn):
        at = warpgroup * stages + rem(turn, stages)
        return {name: ref.at[at] if name in of_stage else ref for name, ref in refs.items()}

    def first_token(tile):
        return plan.start + tile * plan.config.block_tokens

    def load(tile, turn):
        _load_tile(plan, first_token(tile), at_turn(turn))

    def write(tile, turn):
        _write_tile(plan, first_token(tile), (tile - begin) * plan.config.block_tokens, at_turn(turn))

    def load_after(tile, turn):
        """Wait until the tile has left, and begin to bring the next one that takes its place."""
        if "token" in (plan.scale_kind("k"), plan.scale_kind("v")):
            plgpu.commit_smem()  # every warp has stored its scales
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(tile + stages * warpgroups < end)(lambda: load(tile + stages * warpgroups, turn + stages))

    def step(turn, _):
        turn = turn.astype(i32)
        tile = first + turn * warpgroups
        if stages > 1:
            pl.when(turn > 0)(lambda: load_after(tile - warpgroups, turn - 1))
        write(tile, turn)
        if stages == 1:
            load_after(tile, turn)

    own = refs["slots_gmem"], first_token(begin), (end - begin) * plan.config.block_tokens
    fetched = plan.equal_slots.fetch(*own, interpret=interpret)
    if plan.one_tile_each:
        load(first, i32(0))
    else:
        for turn in range(stages):
            tile = first + turn * warpgroups
            pl.when(tile < end)(lambda tile=tile, turn=turn: load(tile, i32(turn)))
    plan.equal_slots.find(fetched, *own, warpgroup, refs, interpret=interpret)
    if plan.one_tile_each:
        write(first, i32(0))
    else:
        lax.fori_loop(0, div(jnp.maximum(end - first, 0) + (warpgroups - 1), warpgroups), step, None)
    plgpu.wait_smem_to_gmem(0)


def _load_tile(plan: Plan, first_token: Any, refs: dict[str, Any]) -> None:
    """Begin to bring what a tile needs, into shared memory that nobody uses any more."""
    if plan.problem.rotation is not None:
        tokens = plan.config.block_tokens
        plgpu.copy_gmem_to_smem(
            refs["positions_gmem"].at[pl.ds(first_token, tokens)],
            refs["positions_smem"].at[pl.ds(0, tokens)],
            refs["positions_ready"],
        )
    for name in plan.arrays:
        rows, ready = plan.rows(name), refs["rows_ready"]
        rows.load(refs[f"{name}_gmem"], refs[f"{name}_smem"], first_token, plan.problem.num_tokens, ready)
        if plan.scale_kind(name) in ("head", "token"):
            _load_scales(plan, name, first_token, refs)


def _write_tile(plan: Plan, first_token: Any, first_own: Any, refs: dict[str, Any]) -> None:
    """Begin to write a tile, which begins with the block's token `first_own`, once its rows are there."""
    p, tokens, rotation = plan.problem, plan.config.block_tokens, plan.problem.rotation
    if rotation is not None:
        _store_cos_sin(plan, refs)
    plgpu.barrier_wait(refs["rows_ready"])
    if any(plan.rotates(name) or plan.converts(name) for name in plan.arrays):
        lax.fori_loop(0, tokens, lambda token, _: _transform(plan, token, refs), None)
    plgpu.commit_smem()
    if rotation is not None:
        plan.rows("q").store(refs["q_smem"], refs["q_out_gmem"], first_token, p.num_tokens)

    def store(token, _):
        slot = refs["kept_smem"][first_own + token]

        @pl.when(slot >= 0)
        def _():
            page, offset = div(slot, p.page_size), rem(slot, p.page_size)
            for name in ("k", "v"):
                rows, source = plan.rows(name), refs[plan.stored_name(name)]
                pages_gmem = refs["k_pages_gmem" if p.joined else f"{name}_pages_gmem"]
                target = _slot(p.kv_layout, pages_gmem, page, slice(None), offset)
                if p.joined:
                    target = target.at[:, pl.ds(p.head_dim if name == "v" else 0, rows.columns)]
                source = source.at[pl.ds(token * rows.pitch, rows.heads)]
                plgpu.copy_smem_to_gmem(source, target, commit_group=False)
                if plan.scale_kind(name) == "token":
                    _store_scales(plan, name, token, page, offset, refs)

    lax.fori_loop(0, tokens, store, None)
    plgpu.commit_smem_to_gmem_group()


def _transform(plan: Plan, token: Any, refs: dict[str, Any]) -> None:
    """Rotate and round a token's rows."""
    rotation = plan.problem.rotation
    for name in plan.arrays:
        source, target = refs[f"{name}_smem"], refs[plan.stored_name(name)]

        def scale_of(layout, name=name):
            return _scale(plan, name, token, layout, refs)

        first = 0
        if rotation is not None and plan.rotates(name):
            half, first = plan.half, rotation.rotary_dim

            def cos_sin(layout):
                cos, sin = (refs[f"{of}_smem"].at[token] for of in ("cos", "sin"))
                return [plgpu.load(x, layout=layout, optimized=False) for x in (cos, sin)]

            registers = plan.registers(name, half)
            rotate_halves(plan.rows(name), registers, source, target, token, cos_sin, half, scale_of)
        rest = plan.rows(name).columns - first
        if plan.converts(name) and rest:
            registers = plan.registers(name, rest)
            convert_columns(plan.rows(name), registers, source, target, token, first, scale_of)


def _slot(kv_layout: str, pages_gmem: Any, page: Any, head: Any, offset: Any) -> Any:
    """One or all heads of a slot in a pool."""
    at = {"HND": (page, head, offset), "NHD": (page, offset, head), "HPND": (head, page, offset)}
    return pages_gmem.at[at[kv_layout]]


def _load_scales(plan: Plan, name: str, first_token: Any, refs: dict[str, Any]) -> None:
    first = first_token * plan.problem.num_kv_heads if plan.scale_kind(name) == "token" else first_token * 0
    values = plan.scale_values(name)
    for start in range(0, values, COPY_VALUES):
        count = min(COPY_VALUES, values - start)
        plgpu.copy_gmem_to_smem(
            refs[f"{name}_scale_gmem"].at[pl.ds(first + start, count)],
            refs[f"{name}_scale_smem"].at[pl.ds(start, count)],
            refs["rows_ready"],
        )


def _scale(plan: Plan, name: str, token: Any, layout: Any, refs: dict[str, Any]) -> Any:
    """What a token's rows are divided by: nothing, a scalar, or [rows] in `layout`."""
    kind = plan.scale_kind(name)
    if kind is None:
        return None
    if kind == "tensor":
        return refs[f"{name}_scale_gmem"][0]
    first = token * plan.problem.num_kv_heads if kind == "token" else 0
    at = pl.ds(first, plan.rows(name).pitch)
    return plgpu.load(refs[f"{name}_scale_smem"].at[at], layout=layout, optimized=False)


def _store_scales(plan: Plan, name: str, token: Any, page: Any, offset: Any, refs: dict[str, Any]) -> None:
    """Write the scales of a token's heads, which lie a page apart."""

    def store(head, _):
        scale = refs[f"{name}_scale_smem"][token * plan.problem.num_kv_heads + head]
        _slot(plan.problem.kv_layout, refs[f"{name}_scale_pages_gmem"], page, head, offset)[...] = scale

    lax.fori_loop(0, plan.problem.num_kv_heads, store, None)


def _store_cos_sin(plan: Plan, refs: dict[str, Any]) -> None:
    """Put the cosines and sines of a tile's tokens into shared memory."""
    rotation = plan.problem.rotation
    assert rotation is not None
    half, layout = plan.half, plan.registers("cos", plan.half).layout
    shape = (plan.cos_sin_rows, half)
    plgpu.barrier_wait(refs["positions_ready"])
    if rotation.table_positions is None:
        positions = plgpu.load(
            refs["positions_smem"].at[pl.ds(0, shape[0])], layout=layout.reduce(1), optimized=False
        )
        inv_freq = plgpu.load(refs["frequencies_gmem"], layout=layout.reduce(0), optimized=False)
        angles = along_columns(positions.astype(f32), shape) * along_rows(inv_freq, shape)
        angles = plgpu.layout_cast(angles, layout)
        refs["cos_smem"][...], refs["sin_smem"][...] = jnp.cos(angles), jnp.sin(angles)
        plgpu.commit_smem()
        return

    def store(token, _):
        position = refs["positions_smem"][token]
        inside = (position >= 0) & (position < rotation.table_positions)
        row = refs["frequencies_gmem"].at[jnp.where(inside, position, 0)]
        for i, name in enumerate(("cos_smem", "sin_smem")):
            values = plgpu.load(row.at[pl.ds(i * half, half)], layout=layout.reduce(0), optimized=False)
            refs[name].at[token][...] = values.astype(f32) + jnp.where(inside, f32(0), f32(jnp.nan))

    lax.fori_loop(0, plan.config.block_tokens, store, None)
    plgpu.commit_smem()
