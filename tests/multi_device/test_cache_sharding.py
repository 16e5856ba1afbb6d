"""`jax_paged_attn.sharding` over 8 devices: what one device gives, by the expected exchanges only."""

import dataclasses
import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.experimental import checkify
from jax.sharding import AxisType

import jax_paged_attn
from jax_paged_attn import PageTable, explain, merge_states, reference, testing
from jax_paged_attn.sharding import (
    CacheSharding,
    ShardedPageTable,
    local_lens,
    local_slots,
    local_table,
    merge_across,
)

SHAPE = {"rows": 2, "heads": 2, "context": 2}
ROWS, WIDTH, PAGES = 3, 4, 13  # of a shard: rows, pages a row at most, pages in its pool


def make_mesh(shape=None, kind=AxisType.Auto):
    shape = shape or SHAPE
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(kind,) * len(shape))


def compile_and_run(call, *arguments, **options):
    """The result, and the exchanges that it took."""
    compiled = jax.jit(call, **options).lower(*arguments).compile()
    return compiled(*arguments), testing.collectives(compiled)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs as one device takes them, and the table and slots as a sharded call does."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    table: PageTable
    sharded_table: Any
    kv_lens: np.ndarray
    slots: jax.Array
    sharded_slots: jax.Array


def make_problem(
    shards=1,
    num_q_heads=16,
    num_kv_heads=8,
    page_size=16,
    head_dim=24,
    dtype="float32",
    kv_layout="HND",
    seed=0,
):
    """Unused slots hold NaN, as does a page of each pool; rows of all lengths, an empty one among them."""
    rng = np.random.default_rng(seed)
    batch = shards * ROWS
    lens = rng.integers(1, WIDTH * page_size + 1, (shards, ROWS))
    lens[0, 0] = 0
    used = [rng.permutation(PAGES - 1)[: ROWS * WIDTH] for _ in range(shards)]
    tables = np.stack(used).reshape(shards, ROWS, WIDTH)
    q = rng.standard_normal((batch, num_q_heads, head_dim))
    k, v = rng.standard_normal((2, shards * PAGES, num_kv_heads, page_size, head_dim))
    unused = np.ones((shards * PAGES, page_size), bool)
    for shard, row in np.ndindex(shards, ROWS):
        for page in range(-(-lens[shard, row] // page_size)):
            left = lens[shard, row] - page * page_size
            unused[shard * PAGES + tables[shard, row, page], :left] = False
    order = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3), "HPND": (1, 0, 2, 3)}[kv_layout]
    k, v = (np.where(unused[:, None, :, None], np.nan, x).transpose(order) for x in (k, v))
    last = np.maximum(lens - 1, 0)
    slots = np.take_along_axis(tables, last[..., None] // page_size, 2)[..., 0] * page_size + last % page_size
    slots[0, 1] = -1
    in_all = np.where(slots < 0, -1, slots + PAGES * page_size * np.arange(shards)[:, None])
    in_the_pool = tables + PAGES * np.arange(shards)[:, None, None]
    table = PageTable.from_block_tables(in_the_pool.reshape(batch, WIDTH), lens.reshape(batch))
    return Problem(
        q=jnp.asarray(q, dtype),
        k=jnp.asarray(k, dtype),
        v=jnp.asarray(v, dtype),
        table=table,
        sharded_table=ShardedPageTable.from_block_tables(tables, lens) if shards > 1 else table,
        kv_lens=lens.reshape(batch),
        slots=jnp.asarray(in_all.reshape(batch), jnp.int32),
        sharded_slots=jnp.asarray(slots if shards > 1 else slots[0], jnp.int32),
    )


def place(sharded, kv_layout, *pools):
    return [jax.device_put(pool, sharded.pages_sharding(kv_layout)) for pool in pools]


def addresses(*arrays):
    """Where each array's part on each device begins."""
    return [[s.data.unsafe_buffer_pointer() for s in array.addressable_shards] for array in arrays]


# Axes of a mesh of 8, how it is used, and the exchanges that attention then needs.
WAYS = {
    "heads": ({"x": 8}, {"heads": "x"}, {}),
    "rows": ({"x": 8}, {"rows": "x"}, {}),
    "context of two axes": ({"x": 4, "y": 2}, {"context": ("y", "x")}, {"all-to-all": 1}),
    "all three": (SHAPE, {name: name for name in SHAPE}, {"all-to-all": 1}),
    "beside another axis": ({"x": 2, "other": 4}, {"context": "x"}, {"all-to-all": 1}),
}


@pytest.mark.parametrize(
    ("way", "kv_layout", "kind"),
    [
        *((way, "HND", AxisType.Auto) for way in WAYS),
        ("all three", "NHD", AxisType.Explicit),
    ],
)
def test_paged_attention_equals_one_device(way, kv_layout, kind):
    shape, axes, expected_collectives = WAYS[way]
    sharded = CacheSharding(make_mesh(shape, kind), **axes)
    shards = sharded.mesh.shape[axes["rows"]] if "rows" in axes else 1
    p = make_problem(shards, kv_layout=kv_layout)
    starts = jnp.asarray(p.kv_lens // 3, jnp.int32)
    options = {"kv_layout": kv_layout, "return_lse": True, "sm_scale": 0.3}

    def call(q, k, v, table, kv_starts):
        return sharded.paged_attention(q, k, v, table, kv_starts=kv_starts, **options)

    result, found = compile_and_run(call, p.q, *place(sharded, kv_layout, p.k, p.v), p.sharded_table, starts)
    expected = reference.paged_attention(p.q, p.k, p.v, p.table, kv_starts=starts, **options)
    testing.assert_close(result, expected)
    assert found == expected_collectives


def test_more_devices_than_kv_heads():
    """Heads are kept repeated: attention, and writes of the new tokens of the heads that there are."""
    sharded = CacheSharding(make_mesh({"x": 8}), heads="x")
    p = make_problem(num_q_heads=24, num_kv_heads=4)
    copies = sharded.stored_kv_heads(4) // 4
    pools = place(sharded, "HND", *(jnp.repeat(x, copies, axis=1) for x in (p.k, p.v)))
    k_new, v_new = np.random.default_rng(1).standard_normal((2, ROWS, 4, 24)).astype("float32")

    def step(q, k, v, k_new, v_new, slots, table):
        k, v = sharded.append_paged_kv(k, v, k_new, v_new, slots)
        return sharded.paged_attention(q, k, v, table, return_lse=True)

    result, found = compile_and_run(step, p.q, *pools, k_new, v_new, p.sharded_slots, p.table)
    k, v = reference.append_paged_kv(p.k, p.v, k_new, v_new, p.slots)
    testing.assert_close(result, reference.paged_attention(p.q, k, v, p.table, return_lse=True))
    assert found == {}


def test_decode_attention_equals_one_device():
    sharded = CacheSharding(make_mesh(), **{name: name for name in SHAPE})
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((4, 8, 24)), jnp.float32)
    k, v = jnp.asarray(rng.standard_normal((2, 4, 50, 4, 24)), jnp.float32)
    lens, starts = jnp.array([50, 0, 26, 13]), jnp.array([3, 0, 25, 2])
    options: dict[str, Any] = {"kv_layout": "NHD", "return_lse": True}

    def call(q, k, v, lens, starts):
        return sharded.decode_attention(q, k, v, lens, kv_starts=starts, **options)

    result, found = compile_and_run(call, q, *place(sharded, "NHD", k, v), lens, starts)
    testing.assert_close(result, reference.decode_attention(q, k, v, lens, kv_starts=starts, **options))
    assert found == {"all-to-all": 1}


def test_one_unbatched_row():
    """Of a contiguous cache, over heads and context; and paged."""
    sharded = CacheSharding(make_mesh(), heads="heads", context=("rows", "context"))
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((8, 24), (4, 48, 24)))
    out = sharded.decode_attention(q, k, k, 31)
    testing.assert_close(out, reference.decode_attention(q, k, k, 31))
    p = make_problem()
    table = PageTable.from_block_tables(p.table.indices[:WIDTH], 40)
    k, v = (jnp.nan_to_num(x) for x in (p.k, p.v))
    out = sharded.paged_attention(p.q[0], k, v, table, kv_starts=7)
    testing.assert_close(out, reference.paged_attention(p.q[0], k, v, table, kv_starts=7))


def test_heads_that_the_context_does_not_divide_are_summed():
    """To an output that is the same on all devices, by two sums of outputs and lse."""
    sharded = CacheSharding(make_mesh({"x": 8}), context="x")
    p = make_problem(num_q_heads=9, num_kv_heads=3)
    call = functools.partial(sharded.paged_attention, return_lse=True)
    result, found = compile_and_run(call, p.q, *place(sharded, "HND", p.k, p.v), p.table)
    testing.assert_close(result, reference.paged_attention(p.q, p.k, p.v, p.table, return_lse=True))
    assert result[0].sharding.is_fully_replicated
    assert found == {"all-reduce": 2}


@pytest.mark.parametrize("scale", ["head", "token"])
def test_quantized_caches(scale):
    sharded = CacheSharding(make_mesh(), **{name: name for name in SHAPE})
    p = make_problem(shards=2, dtype="bfloat16", num_q_heads=8, num_kv_heads=4)
    shape = {"head": (4,), "token": p.k.shape[:-1]}[scale]
    rng = np.random.default_rng(1)
    scales: dict[str, Any] = {
        f"{x}_scale": jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32) for x in "kv"
    }
    k, v = (x.astype("float8_e4m3fn") for x in (p.k, p.v))
    call = functools.partial(sharded.paged_attention, return_lse=True)
    result, found = compile_and_run(
        lambda q, k, v, table, scales: call(q, k, v, table, **scales),
        p.q,
        *place(sharded, "HND", k, v),
        p.sharded_table,
        scales,
    )
    testing.assert_close(result, reference.paged_attention(p.q, k, v, p.table, return_lse=True, **scales))
    assert found == {"all-to-all": 1}


def test_windows_and_sinks_over_context():
    """A window is told from the row's length; sinks are counted once."""
    sharded = CacheSharding(make_mesh(), heads="heads", context=("rows", "context"))
    p = make_problem()
    sinks = jnp.linspace(-1.0, 2.0, 16)
    out, lse = sharded.paged_attention(p.q, p.k, p.v, p.table, window_left=20, sinks=sinks, return_lse=True)
    starts = jnp.maximum(p.table.kv_lens - 21, 0)
    keys = reference.paged_attention(p.q, p.k, p.v, p.table, kv_starts=starts, return_lse=True)
    sink = jnp.broadcast_to(sinks, lse.shape)
    expected = reference.merge_state(keys[0], keys[1], jnp.zeros_like(out), sink)
    testing.assert_close((out, lse), expected)
    # Of a contiguous cache with one length for all rows, which is longer than there is room.
    k, v = (jnp.nan_to_num(x[:ROWS]) for x in (p.k, p.v))
    last_2 = sharded.decode_attention(p.q, k, v, 99, window_left=1)
    starts = jnp.full(ROWS, 14)
    testing.assert_close(last_2, reference.decode_attention(p.q, k, v, 16, kv_starts=starts))
    whole = sharded.paged_attention(p.q, p.k, p.v, p.table, window_left=-1)
    testing.assert_close(whole, reference.paged_attention(p.q, p.k, p.v, p.table))


@pytest.mark.parametrize("kv_layout", ["HND", "HPND"])
def test_writes_equal_one_device(kv_layout):
    """Over all three; every other slot keeps its bits, and the pools are written in place, by no exchange."""
    sharded = CacheSharding(make_mesh(), **{name: name for name in SHAPE})
    p = make_problem(shards=2, num_q_heads=8, num_kv_heads=4, kv_layout=kv_layout)
    rng = np.random.default_rng(2)
    tokens = p.q.shape[0]
    q, k_new, v_new = (
        jnp.asarray(rng.standard_normal((tokens, heads, 24)), jnp.float32) for heads in (8, 4, 4)
    )
    positions = jnp.asarray(np.maximum(p.kv_lens - 1, 0), jnp.int32)
    inv_freq = jax_paged_attn.rope_frequencies(24)

    def write(k, v, q, k_new, v_new, positions, slots, call=sharded.rope_append_paged_kv):
        return call(q, k_new, v_new, positions, k, v, slots, inv_freq=inv_freq, kv_layout=kv_layout)

    pools = place(sharded, kv_layout, p.k, p.v)
    where = addresses(*pools)
    result, found = compile_and_run(
        write, *pools, q, k_new, v_new, positions, p.sharded_slots, donate_argnums=(0, 1)
    )
    expected = write(p.k, p.v, q, k_new, v_new, positions, p.slots, reference.rope_append_paged_kv)
    chex.assert_trees_all_close(result, expected, atol=1e-5)
    assert found == {}
    assert addresses(*result[1:]) == where
    assert [x.sharding.spec for x in result[1:]] == [sharded.pages_spec(kv_layout)] * 2


def test_writes_with_scales_of_tokens():
    sharded = CacheSharding(make_mesh(), rows="rows", heads=("heads", "context"))
    p = make_problem(shards=2, num_kv_heads=2, num_q_heads=4, dtype="bfloat16")
    rng = np.random.default_rng(2)
    k_new, v_new = jnp.asarray(rng.standard_normal((2, *p.q.shape[:1], 2, 24)), jnp.bfloat16)
    scales = jnp.asarray(rng.uniform(0.01, 0.1, (2, *p.q.shape[:1], 2)), jnp.float32)
    pools = [jnp.zeros(p.k.shape, jnp.int8)] * 2
    scale_pools = [jnp.zeros(p.k.shape[:-1])] * 2
    names = ("k_scale", "v_scale", "k_scale_pages", "v_scale_pages")

    def write(call: Any, pools, scale_pools, slots):
        return call(*pools, k_new, v_new, slots, **dict(zip(names, (*scales, *scale_pools), strict=True)))

    expected = write(reference.append_paged_kv, pools, scale_pools, p.slots)
    copies = [[jnp.repeat(x, 2, axis=1) for x in xs] for xs in (pools, scale_pools)]
    result = write(sharded.append_paged_kv, copies[0], copies[1], p.sharded_slots)
    chex.assert_trees_all_equal(tuple(result), tuple(jnp.repeat(x, 2, axis=1) for x in expected))


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_writes_to_a_contiguous_cache_equal_one_device(kv_layout):
    """Over all three, with the head twice; some tokens fall past the end of their row, one row stays."""
    mesh = make_mesh()
    rng = np.random.default_rng(2)
    shape = (4, 1, 12, 24) if kv_layout == "HND" else (4, 12, 1, 24)
    k, v = jnp.asarray(rng.standard_normal((2, *shape)), jnp.float32).astype("float8_e5m2")
    k_new, v_new = jnp.asarray(rng.standard_normal((2, 4, 5, 1, 24)), jnp.float32)
    scales = jnp.asarray(rng.uniform(0.5, 2, (2, 4, 5, 1)), jnp.float32)
    scale_caches = jnp.ones((2, *shape[:-1]))
    lens = jnp.array([0, 4, 10, -1])
    heads_axis = 1 if kv_layout == "HND" else 2

    def write(call, caches, scale_caches):
        names = ("k_scale", "v_scale", "k_scale_cache", "v_scale_cache")
        options = dict(zip(names, (*scales, *scale_caches), strict=True))
        return call(*caches, k_new, v_new, lens, kv_layout=kv_layout, **options)

    expected = write(reference.append_kv, (k, v), scale_caches)
    expected = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=heads_axis), tuple(expected))
    twice = [[jnp.repeat(x, 2, axis=heads_axis) for x in xs] for xs in ((k, v), scale_caches)]
    for axes in ({name: name for name in SHAPE}, {"rows": "rows", "heads": "heads"}):
        result = write(CacheSharding(mesh, **axes).append_kv, *twice)
        chex.assert_trees_all_equal(tuple(result), expected)
    check = functools.partial(CacheSharding(mesh, context="context").append_kv, validate_values=True)
    news = k_new, v_new
    caches = [jnp.zeros(shape)] * 2
    message = r"kv_lens: expected values in \[0, 7\], as 5 tokens come to max_kv_len=12, got 10 at index 2"
    refuses(message, check, *caches, *news, lens, kv_layout=kv_layout)


def test_layers_in_a_scan_and_under_vmap():
    """One exchange a layer, or one for all."""
    sharded = CacheSharding(make_mesh(), **{name: name for name in SHAPE})
    p = make_problem(shards=2)
    q, k, v = (jnp.stack([x, x[::-1]]) for x in (p.q, jnp.nan_to_num(p.k), jnp.nan_to_num(p.v)))
    spec = P(None, *sharded.pages_spec())
    pools = [jax.device_put(x, jax.NamedSharding(sharded.mesh, spec)) for x in (k, v)]
    expected = [reference.paged_attention(q[i], k[i], v[i], p.table) for i in range(2)]

    def scanned(q, k, v, table):
        return jax.lax.scan(lambda _, x: (None, sharded.paged_attention(*x, table)), None, (q, k, v))[1]

    def mapped(q, k, v, table):
        return jax.vmap(lambda q, k, v: sharded.paged_attention(q, k, v, table))(q, k, v)

    for program in (scanned, mapped):
        result, found = compile_and_run(program, q, *pools, p.sharded_table)
        for layer, out in enumerate(result):
            testing.assert_close(out, expected[layer])
        assert found == {"all-to-all": 1}


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map_of_the_users_own(check_vma):
    """Context parallel by hand: the pieces that the methods are made of."""
    mesh = make_mesh({"x": 8})
    p = make_problem()
    pages = P(None, None, "x")

    def step(q, k, v, k_new, slots, table):
        page_size = k.shape[2]
        slots = local_slots(slots, "x", page_size=page_size)
        k, v = jax_paged_attn.append_paged_kv(k, v, k_new, k_new, slots)
        part = local_table(table, "x", page_size=page_size)
        out, lse = jax_paged_attn.paged_attention(q, k, v, part, return_lse=True)
        scattered = merge_across(out, lse, "x", scatter_axis=1)
        return merge_across(out, lse, "x"), scattered, part.kv_lens[None]

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), pages, pages, P(), P(), P()),
        out_specs=(P(), (P(None, "x"), P(None, "x")), P("x")),
        check_vma=check_vma,
    )
    k_new = jnp.asarray(np.random.default_rng(1).standard_normal((ROWS, 8, 24)), jnp.float32)
    everywhere, scattered, lens = jax.jit(mapped)(p.q, p.k, p.v, k_new, p.slots, p.table)
    k, v = reference.append_paged_kv(p.k, p.v, k_new, k_new, p.slots)
    expected = reference.paged_attention(p.q, k, v, p.table, return_lse=True)
    testing.assert_close(everywhere, expected)
    testing.assert_close(scattered, expected)
    chex.assert_trees_all_equal(lens.sum(0), p.table.kv_lens)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_merge_across_equals_merge_states(dtype):
    """With empty states, whose output may be anything, and rows where all are empty."""
    rng = np.random.default_rng(0)
    outs = jnp.asarray(rng.standard_normal((8, 3, 16, 5)), dtype)
    lses = jnp.asarray(60 * rng.standard_normal((8, 3, 16)), jnp.float32)
    empty = jnp.asarray(rng.random((8, 3, 16)) < 0.4).at[:, 1].set(True)
    lses = jnp.where(empty, jnp.where(jnp.arange(8)[:, None, None] % 2 == 0, jnp.inf, -jnp.inf), lses)
    outs = jnp.where(empty[..., None], jnp.nan, outs).astype(dtype)
    mesh = make_mesh({"x": 8})

    def merge(scatter_axis, specs):
        call = functools.partial(merge_across, axis_name="x", scatter_axis=scatter_axis)
        each = jax.shard_map(
            lambda out, lse: call(out[0], lse[0]), mesh=mesh, in_specs=P("x"), out_specs=specs
        )
        return jax.jit(each)(outs, lses)

    expected = merge_states(outs, lses)
    heads = (P(None, "x"), P(None, "x"))
    chex.assert_trees_all_close(merge(1, heads), expected, rtol=1e-6)
    chex.assert_trees_all_close(merge(None, P()), expected, rtol=1e-2 if dtype == "bfloat16" else 1e-5)
    with pytest.raises(ValueError, match=r"^scatter_axis: expected an axis of a multiple of 8 .* of 3"):
        merge(0, heads)


def test_local_lens_of_every_length():
    mesh = make_mesh({"x": 8})
    lens = jnp.arange(-3, 100)
    count = jax.shard_map(
        lambda n: local_lens(n, "x", page_size=3)[None], mesh=mesh, in_specs=P(), out_specs=P("x")
    )
    of_devices = [[sum(t % 24 // 3 == i for t in range(n)) for n in range(100)] for i in range(8)]
    chex.assert_trees_all_equal(count(lens)[:, 3:], jnp.array(of_devices))
    assert (count(lens)[:, :3] <= 0).all()


def test_explain_speaks_of_one_device():
    sharded = CacheSharding(make_mesh(), **{name: name for name in SHAPE})
    p = make_problem(shards=2, dtype="bfloat16", head_dim=64)
    record = explain(sharded.paged_attention, p.q, p.k, p.v, p.sharded_table, target="sm_90")
    assert record.implementation == "mosaic_gpu"
    sizes = record.problem
    assert (sizes.batch, sizes.num_kv_heads, sizes.page_size, sizes.num_pages) == (ROWS, 4, 8, PAGES)
    new = jnp.zeros((6, 8, 64), jnp.bfloat16)
    call = functools.partial(explain, sharded.append_paged_kv, target="sm_90")
    assert call(p.k, p.v, new, new, p.sharded_slots).implementation == "mosaic_gpu"


def refuses(message, call, *arguments, error: Any = ValueError, **options):
    with pytest.raises(error, match=message):
        call(*arguments, **options)


def test_global_and_local_page_ids_are_told_apart():
    rows = CacheSharding(make_mesh({"x": 8}), rows="x")
    heads = CacheSharding(make_mesh({"x": 8}), heads="x")
    p = make_problem(shards=8)
    arguments = (p.q, jnp.nan_to_num(p.k), jnp.nan_to_num(p.v))
    of_8 = "^page_table: expected a ShardedPageTable of 8 shards, whose ids are local, as rows='x', got "
    refuses(f"{of_8}a PageTable", rows.paged_attention, *arguments, p.table)
    one = "^page_table: expected a PageTable"
    refuses(f"{one}, as rows=None", heads.paged_attention, *arguments, p.sharded_table)
    refuses(one, jax_paged_attn.paged_attention, *arguments, p.sharded_table)
    fewer = jax.tree.map(lambda x: x[:4], p.sharded_table)
    refuses(f"{of_8}one of 4", rows.paged_attention, *arguments, fewer)

    # Ids of the whole pool, in the table of a shard.
    tables = p.table.indices.reshape(8, ROWS, WIDTH)
    whole = ShardedPageTable.from_block_tables(tables, p.kv_lens.reshape(8, ROWS))
    message = rf"page_table.indices: expected used page ids in \[0, {PAGES - 1}\], got "
    check = functools.partial(rows.paged_attention, validate_values=True)
    refuses(message, check, *arguments, whole)
    testing.assert_close(check(*arguments, p.sharded_table), reference.paged_attention(*arguments, p.table))
    error, _ = checkify.checkify(jax.jit(check))(*arguments, whole)
    assert re.search(message, error.get() or "")

    k_new = jnp.ones((8 * ROWS, 8, 24))
    append = rows.append_paged_kv
    of_shards = rf"^slot_mapping: expected shape \(8, {ROWS}\), got shape"
    refuses(of_shards, append, *arguments[1:], k_new, k_new, p.slots)
    slots = p.slots.reshape(8, ROWS)
    check = functools.partial(append, validate_values=True)
    refuses("slot_mapping: expected slots below", check, *arguments[1:], k_new, k_new, slots)
    refuses("^slot_mapping: expected shape", heads.append_paged_kv, *arguments[1:], k_new, k_new, slots)


def test_mistakes_are_named():
    mesh = make_mesh({"x": 8})
    p = make_problem()
    arguments = (p.q, p.k, p.v, p.table)
    refuses("^heads: expected axes of the mesh, .'x',., got 'y'", CacheSharding, mesh, heads="y")
    refuses(
        "^heads, rows, context: expected each mesh axis once", CacheSharding, mesh, heads="x", rows=("x",)
    )
    heads, context = CacheSharding(mesh, heads="x"), CacheSharding(mesh, context="x")
    refuses("^num_kv_heads: expected a multiple or a divisor of the 8 devices", heads.stored_kv_heads, 3)
    q, k, v, table = arguments
    few = p.k[:, :4]
    message = "^k_pages: expected a multiple of the 8 devices along 'x', got an axis of 4"
    refuses(message, heads.paged_attention, q, few, few, table)
    refuses("^q: expected a multiple of the 8", heads.paged_attention, q[:, :12], k, v, table)
    odd = p.k[:, :, :12]
    refuses("^k_pages: expected a multiple of the 8", context.paged_attention, q, odd, odd, table)
    refuses("^return_lse: expected a bool", heads.paged_attention, *arguments, return_lse=1)
    refuses("^kv_layout: expected one of", heads.paged_attention, *arguments, kv_layout="DHN")
    with pytest.raises(TypeError, match="no_option"):
        heads.paged_attention(*arguments, no_option=1)
    for name in ("alibi_slopes", "mask"):
        call = functools.partial(context.paged_attention, **{name: jnp.ones(16)})
        refuses(f"^{name}: can't be had with context", call, *arguments, error=NotImplementedError)
    explicit = CacheSharding(make_mesh({"x": 8}, AxisType.Explicit), heads="x")
    refuses("^k_pages: expected an array sharded as", explicit.paged_attention, *arguments)
    tables = jnp.zeros((2, 1, 3), jnp.int32)
    build, lens = ShardedPageTable.from_block_tables, jnp.ones(2, jnp.int32)
    refuses("^seq_lens: expected shape", build, tables, lens)
    refuses("^block_tables: expected shape", build, tables[0], lens)
    refuses("^tables: expected at least one", ShardedPageTable.stack, [])
    other = PageTable.from_block_tables([[1]], [2])
    refuses("^tables: expected tables of one shape", ShardedPageTable.stack, [table, other])


def test_a_stack_of_tables_looks_up_slots():
    p = make_problem(shards=2)
    tables = [jax.tree.map(lambda x, i=i: x[i], p.sharded_table.tables) for i in range(2)]
    stacked = ShardedPageTable.stack(tables)
    chex.assert_trees_all_equal(stacked, p.sharded_table)
    rows = jnp.tile(jnp.arange(ROWS), (2, 1))
    last = stacked.tables.kv_lens - 1
    found = stacked.slot_mapping(rows, last, page_size=16)
    expected = [jax_paged_attn.slot_mapping(t, rows[0], last[i], page_size=16) for i, t in enumerate(tables)]
    chex.assert_trees_all_equal(found, jnp.stack(expected))
    refuses("^batch_indices: expected shape", stacked.slot_mapping, rows[0], last, page_size=16)
