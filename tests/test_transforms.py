"""Under jit, vmap, scan and the settings that change how JAX promotes and compiles."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import PageTable, decode_attention, dispatch, paged_attention, reference, testing

NAMES = [implementation.name for implementation in dispatch.IMPLEMENTATIONS]
PAGE_SIZE = 16

pytestmark = pytest.mark.parametrize("implementation", NAMES)


def inputs(batch=3, width=3, seed=0):
    """q, k_pages, v_pages, block tables and lengths; the last page is NaN and no row's."""
    rng = np.random.default_rng(seed)
    num_pages = batch * width + 1
    q = jnp.asarray(rng.standard_normal((batch, 4, 64)), jnp.bfloat16)
    k, v = rng.standard_normal((2, num_pages, 2, PAGE_SIZE, 64))
    k[-1] = v[-1] = np.nan
    tables = rng.permutation(num_pages - 1).reshape(batch, width)
    lens = rng.integers(0, width * PAGE_SIZE + 1, batch)
    as_bf16 = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    return q, as_bf16(k), as_bf16(v), jnp.asarray(tables, jnp.int32), jnp.asarray(lens, jnp.int32)


def attend(q, k, v, tables, lens, **options):
    table = PageTable.from_block_tables(tables, lens)
    return paged_attention(q, k, v, table, return_lse=True, **options)


def expected(q, k, v, tables, lens):
    return reference.paged_attention(q, k, v, PageTable.from_block_tables(tables, lens), return_lse=True)


def bind(implementation, **options):
    return functools.partial(attend, implementation=implementation, **options)


@pytest.mark.newest
def test_jit(implementation):
    arguments = inputs()
    testing.assert_close(jax.jit(bind(implementation))(*arguments), expected(*arguments))


def test_one_compile_for_all_lengths_and_tables(implementation):
    chex.clear_trace_counter()  # chex takes the function for the one of the other implementations

    @jax.jit
    @chex.assert_max_traces(n=1)
    def call(*arguments):
        return attend(*arguments, implementation=implementation)

    for seed in range(2 if testing.interpreting(implementation) else 5):
        q, k, v, tables, lens = inputs(seed=seed)
        testing.assert_close(call(q, k, v, tables, lens), expected(q, k, v, tables, lens))


def test_vmap_over_rows_with_the_cache_shared(implementation):
    arguments = inputs()
    mapped = jax.jit(jax.vmap(bind(implementation), in_axes=(0, None, None, 0, 0)))
    testing.assert_close(mapped(*arguments), expected(*arguments))


def test_vmap_over_everything(implementation):
    each = [inputs(seed=seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    out, lse = jax.vmap(bind(implementation))(*stacked)
    for index, arguments in enumerate(each):
        testing.assert_close((out[index], lse[index]), expected(*arguments))


def test_nested_vmap(implementation):
    each = [inputs(batch=2, width=2, seed=seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    nested = jax.vmap(jax.vmap(bind(implementation), in_axes=(0, None, None, 0, 0)))
    out, lse = nested(*stacked)
    for index, arguments in enumerate(each):
        testing.assert_close((out[index], lse[index]), expected(*arguments))


def test_vmap_over_a_page_table_with_shared_indices(implementation):
    q, k, v, tables, lens = inputs()
    table = PageTable.from_block_tables(tables, lens)
    axes = PageTable(indices=None, row_starts=0, row_pages=0, kv_lens=0)  # pyright: ignore[reportArgumentType]
    call = functools.partial(paged_attention, implementation=implementation)
    out = jax.vmap(call, in_axes=(0, None, None, axes))(q, k, v, table)
    testing.assert_close(out, expected(q, k, v, tables, lens)[0])


def test_vmap_over_heads_of_a_contiguous_cache(implementation):
    q, k, v, lens = testing.make_inputs(testing.case("contiguous")).args
    call = functools.partial(decode_attention, return_lse=True, implementation=implementation)
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    # One kv head a call: its axis is mapped and comes back as an axis of size one.
    out, lse = jax.vmap(call, in_axes=(1, 1, 1, None), out_axes=1)(
        grouped, k[:, :, None], v[:, :, None], lens
    )
    result = out.reshape(q.shape), lse.reshape(q.shape[:2])
    testing.assert_close(result, reference.decode_attention(q, k, v, lens, return_lse=True))


def test_scan_with_a_traced_scale(implementation):
    q, k, v, tables, lens = inputs()
    scales = jnp.array([0.1, 0.0, -0.3], jnp.float32)

    def layer(carry, sm_scale):
        return carry, bind(implementation, sm_scale=sm_scale)(q, k, v, tables, lens)

    _, (out, lse) = jax.jit(lambda: jax.lax.scan(layer, None, scales))()
    table = PageTable.from_block_tables(tables, lens)
    for index, sm_scale in enumerate(scales):
        want = reference.paged_attention(q, k, v, table, sm_scale=sm_scale, return_lse=True)
        testing.assert_close((out[index], lse[index]), want)


@pytest.mark.newest
def test_x64(implementation):
    arguments = inputs()
    plain = bind(implementation, num_splits=2)(*arguments)
    with jax.enable_x64(True):
        q, k, v, tables, lens = arguments
        wide = bind(implementation, num_splits=2)(q, k, v, tables.astype("int64"), lens.astype("int64"))
        starts = jnp.zeros(lens.shape, "int64")
        with_starts = bind(implementation, kv_starts=starts)(*arguments)
    chex.assert_trees_all_equal_dtypes(plain, wide, with_starts)
    chex.assert_trees_all_equal(plain, wide)
    testing.assert_close(with_starts, expected(*arguments))


def test_an_eager_call_compiles_once_a_shape(implementation):
    sizes = []
    for seed in (0, 1):
        bind(implementation)(*inputs(batch=2, width=2, seed=seed))
        sizes.append(dispatch._run._cache_size())  # pyright: ignore[reportAttributeAccessIssue]
    assert sizes[0] == sizes[1]


def test_a_rows_bits_do_not_depend_on_batch_mates_or_capacity(implementation):
    q, k, v, tables, _ = inputs(batch=3, width=9)
    lens = jnp.array([140, 7, 144], jnp.int32)
    call = bind(implementation, num_splits=2)
    out, lse = call(q, k, v, tables, lens)
    mates = call(q[::-1], k, v, tables[::-1], jnp.array([1, 0, 140], jnp.int32))
    chex.assert_trees_all_equal((mates[0][2], mates[1][2]), (out[0], lse[0]))
    if implementation == "xla":  # XLA compiles other shapes to other sums
        return
    alone = call(q[:1], k, v, tables[:1], lens[:1])
    chex.assert_trees_all_equal(alone, (out[:1], lse[:1]))
    wide = jnp.pad(tables, ((0, 0), (0, 5)), constant_values=-1)
    roomy = call(q, *(jnp.pad(x, ((0, 20), *[(0, 0)] * 3)) for x in (k, v)), wide, lens)
    chex.assert_trees_all_equal(roomy, (out, lse))


@pytest.mark.parametrize("kv_layout", ["NHD", "HPND"])
@pytest.mark.parametrize("mapped", [(0, 0, None, None, 0), (None, None, 0, 0, None)])
def test_vmap_of_some_operands(kv_layout, mapped, implementation):
    """Also where K is mapped and V is not, or pools that can't be joined in place."""
    each = [inputs(seed=seed) for seed in range(3)]
    order = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3), "HPND": (1, 0, 2, 3)}[kv_layout]
    stacked = [
        jnp.stack(x) if axis == 0 else x[0] for x, axis in zip(zip(*each, strict=True), mapped, strict=True)
    ]

    def call(q, k, v, tables, lens):
        options = {"kv_layout": kv_layout, "implementation": implementation}
        return attend(q, k.transpose(order), v.transpose(order), tables, lens, **options)

    out, lse = jax.vmap(call, in_axes=mapped)(*stacked)
    for index in range(3):
        arguments = [x[index] if axis == 0 else x for x, axis in zip(stacked, mapped, strict=True)]
        testing.assert_close((out[index], lse[index]), expected(*arguments))


def test_vmap_with_a_mapped_scale(implementation):
    arguments, scales = inputs(), jnp.array([0.1, -0.2], jnp.float32)
    out, lse = jax.vmap(lambda s: attend(*arguments, sm_scale=s, implementation=implementation))(scales)
    for index, scale in enumerate(scales):
        table = PageTable.from_block_tables(*arguments[3:])
        right = reference.paged_attention(*arguments[:3], table, sm_scale=scale, return_lse=True)
        testing.assert_close((out[index], lse[index]), right)
