"""Writes of latents into pages, by every implementation, against the reference."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_paged_attn
from jax_paged_attn import append_paged_mla_kv, dispatch, kv_scale, mla_decode, reference

NAMES = [candidate.name for candidate in dispatch.IMPLEMENTATIONS]
E4M3 = jnp.float8_e4m3fn


def make_call(
    rank=128, rope_dim=64, dtypes=("bfloat16", "bfloat16"), paired=False, scale=None, dtype="bfloat16"
) -> tuple[Any, Any]:
    """Positional arguments and options: 21 tokens into 4 pages of 16, some slots repeated or skipped."""
    rng = np.random.default_rng(rank)
    bits = [
        rng.integers(0, 128, (4, 16, columns * jnp.dtype(d).itemsize), np.uint8).view(jnp.dtype(d))
        for columns, d in zip((rank, rope_dim), dtypes, strict=True)
    ]
    pools = tuple(map(jnp.asarray, bits))
    news = [jnp.asarray(rng.standard_normal((21, n)).astype(dtype)) for n in (rank, rope_dim)]
    slots = rng.choice([-1, 64, *range(64)], 21)
    slots[[3, 20]] = 37
    options = {}
    if scale == "tensor":
        options["kv_scale"] = jnp.float32(0.05)
    elif scale == "token":
        options["kv_scale"] = kv_scale(news[0].reshape(21, -1, 128), dtypes[0], granularity="token")
        options["kv_scale_pages"] = jnp.asarray(rng.random((4, 16, rank // 128)).astype(np.float32))
    pages = pools if paired else jnp.concatenate(pools, axis=-1)
    return (pages, *news, jnp.asarray(slots, jnp.int32)), options


CALLS = {
    "one_pool": {},
    "deepseek": {"rank": 512},
    "narrow": {"rank": 24, "rope_dim": 8},
    "odd": {"rank": 20, "rope_dim": 6},
    "float32": {"dtypes": ("float32", "float32"), "dtype": "float32"},
    "pair": {"rank": 512, "paired": True},
    "e4m3": {"dtypes": ("float8_e4m3fn",) * 2, "scale": "tensor", "rank": 512},
    "int8_pair": {"dtypes": ("int8", "int8"), "scale": "tensor", "paired": True},
    "e4m3_latents": {"dtypes": ("float8_e4m3fn", "bfloat16"), "scale": "tensor", "paired": True},
    "e4m3_token": {"dtypes": ("float8_e4m3fn", "bfloat16"), "scale": "token", "paired": True, "rank": 512},
}


def same_bits(a, b):
    a, b = (np.asarray(x) for x in (a, b))
    return (a.view(f"u{a.dtype.itemsize}") == b.view(f"u{b.dtype.itemsize}")).all()


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("name", CALLS)
def test_matches_the_reference(name, implementation):
    args, options = make_call(**CALLS[name])
    chosen = None if name == "odd" else implementation  # no copy moves its rows
    call = jax.jit(lambda args, options: append_paged_mla_kv(*args, **options, implementation=chosen))
    results = call(args, options)
    expected = reference.append_paged_mla_kv(*args, **options)
    chex.assert_trees_all_equal_shapes_and_dtypes(results, expected)
    for ours, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert same_bits(ours, theirs)


def test_what_was_appended_is_decoded():
    args, options = make_call(**CALLS["e4m3_token"])
    _, kv_latent, k_rope, _ = args
    pair = jnp.full((4, 16, 512), jnp.nan, E4M3), jnp.full((4, 16, 64), jnp.nan, jnp.bfloat16)
    table = jax_paged_attn.PageTable.from_block_tables([[3, 1]], [21])
    slots = jax_paged_attn.slot_mapping(table, [0] * 21, range(21), page_size=16)
    pair, scales = append_paged_mla_kv(pair, kv_latent, k_rope, slots, **options)
    q_nope, q_pe = jnp.ones((1, 4, 512), jnp.bfloat16) / 8, jnp.ones((1, 4, 64), jnp.bfloat16) / 8
    out: Any = mla_decode(q_nope, q_pe, pair, table, sm_scale=0.1, kv_scale=scales)
    x, y = (x.astype(jnp.float32) for x in (kv_latent, k_rope))
    weights = jax.nn.softmax(0.1 / 8 * (x.sum(1) + y.sum(1)))
    chex.assert_trees_all_close(out[0, 0].astype(jnp.float32), weights @ x, atol=0.05)


def test_in_place_when_donated():
    args, options = make_call(**CALLS["one_pool"])
    call = jax.jit(append_paged_mla_kv, donate_argnums=0)
    compiled = call.lower(*args, **options).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == args[0].size * args[0].dtype.itemsize
    before = np.asarray(args[0])
    kept = append_paged_mla_kv(*args)
    assert same_bits(before, args[0])
    assert same_bits(kept, call(*args))


@pytest.mark.parametrize("name", ["one_pool", "e4m3_token"])
def test_vmap(name):
    args, options = make_call(**CALLS[name])
    stacked = jax.tree.map(lambda x: jnp.stack([x, jnp.flip(x, 0)]), (args, options))
    mapped = jax.vmap(lambda args, options: append_paged_mla_kv(*args, **options))(*stacked)
    for i in range(2):
        args, options = jax.tree.map(lambda x, i=i: x[i], stacked)
        expected = append_paged_mla_kv(*args, **options)
        for ours, theirs in zip(jax.tree.leaves(mapped), jax.tree.leaves(expected), strict=True):
            assert same_bits(ours[i], theirs)


def test_no_tokens():
    args, _ = make_call()
    pages, kv_latent, k_rope, slots = args
    assert same_bits(append_paged_mla_kv(pages, kv_latent[:0], k_rope[:0], slots[:0]), pages)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("one_pool", {"kv_latent": jnp.ones((21, 3, 128), jnp.bfloat16)}, "kv_latent: expected shape"),
        ("one_pool", {"k_rope": jnp.ones((20, 64), jnp.bfloat16)}, r"k_rope: expected shape \[21"),
        ("one_pool", {"k_rope": jnp.ones((21, 64))}, "k_rope: expected the dtype of kv_latent"),
        ("one_pool", {"slot_mapping": [1]}, "slot_mapping: expected shape"),
        ("one_pool", {"latent_pages": jnp.ones((4, 16, 200), jnp.bfloat16)}, "latent_pages: expected shape"),
        ("one_pool", {"kv_scale": 2.0}, "kv_scale: expected None"),
        ("one_pool", {"slot_mapping": [64] * 21, "validate_values": True}, "slot_mapping: expected slots"),
        ("e4m3", {"kv_scale": jnp.ones((21, 4))}, "latent_pages: expected a pair"),
        ("e4m3_token", {"kv_scale_pages": None}, "kv_scale_pages: expected room"),
        ("e4m3_token", {"kv_scale": 1.0}, "kv_scale: expected a kv_scale of shape"),
        ("e4m3_token", {"kv_scale_pages": jnp.ones((4, 16, 3))}, "kv_scale_pages: expected shape"),
        ("e4m3_token", {"kv_scale_pages": jnp.ones((4, 16, 4), int)}, "kv_scale_pages: expected dtype"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(name, change, message):
    args, options = make_call(**CALLS[name])
    names = ("latent_pages", "kv_latent", "k_rope", "slot_mapping")
    with pytest.raises(ValueError, match=message):
        append_paged_mla_kv(**(dict(zip(names, args, strict=True)) | options | change))
