"""Writing tokens into a cache: every implementation on every named problem, against the references."""

import dataclasses
import functools
import re
from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jax_paged_attn
from jax_paged_attn import (
    PageTable,
    append_kv,
    append_paged_kv,
    apply_rope,
    dispatch,
    explain,
    paged_attention,
    reference,
    rope_append_paged_kv,
    rope_cos_sin,
    rope_frequencies,
    slot_mapping,
    testing,
)
from jax_paged_attn.kernels.mosaic_gpu import append as kernel
from jax_paged_attn.kernels.mosaic_gpu.append import Config
from jax_paged_attn.testing_append import append_case, append_runs, assert_appended, make_append_inputs
from jax_paged_attn.validation import LAYOUT_AXES

NAMES = [implementation.name for implementation in dispatch.IMPLEMENTATIONS]
RUNS = [
    pytest.param(name, case, id=f"{name}-{case.name}", marks=[pytest.mark.newest] if case.newest else [])
    for name, case in append_runs()
]


@pytest.mark.parametrize(("implementation", "case"), RUNS)
def test_matches_the_reference(implementation, case):
    inputs = make_append_inputs(case)
    if implementation in case.refused_by:
        with pytest.raises(NotImplementedError, match=rf"'{implementation}' can't run this call: .+"):
            inputs.call(jax_paged_attn, implementation=implementation)
        implementation = None  # which falls to one that can
    before = [np.array(x) for x in inputs.args]
    actual = inputs.call(jax_paged_attn, implementation=implementation)
    assert_appended(inputs, actual, inputs.call(reference))
    for array, copy in zip(inputs.args, before, strict=True):  # not donated: the caller's are as they were
        assert (np.asarray(array).view(np.uint8) == copy.view(np.uint8)).all()


def small(kv_layout="HND", num_tokens=5, dtype="bfloat16", **kwargs):
    """Pools, new tokens and slots of a small append, one slot twice and one to skip."""
    case = append_case("one_token")
    case = dataclasses.replace(
        case, name="small", num_tokens=num_tokens, kv_layout=kv_layout, dtype=dtype, **kwargs
    )
    args = list(make_append_inputs(case).args)
    args[4] = jnp.asarray([3, 40, 3, -1, 100, 7, 8][:num_tokens], jnp.int32)
    return args


def same_bits(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        chex.assert_equal_shape([a, b])
        chex.assert_equal(np.asarray(a).tobytes(), np.asarray(b).tobytes())


@pytest.mark.parametrize("implementation", NAMES)
def test_the_last_of_equal_slots_wins(implementation):
    k, v, k_new, v_new, slots = small()
    k_after, v_after = append_paged_kv(k, v, k_new, v_new, slots, implementation=implementation)
    same_bits((k_after[0, :, 3], v_after[0, :, 3]), (k_new[2], v_new[2]))
    same_bits((k_after[2, :, 8], k_after[6, :, 4]), (k_new[1], k_new[4]))


def check_equal_slots(slots, config):
    """Write tokens of their own values to `slots` by the kernel, and compare with `xla`."""
    num_tokens, num_slots = len(slots), int(slots.max()) + 1
    k = jnp.zeros((num_slots, 1, 1, 8), jnp.bfloat16)
    rng = np.random.default_rng(num_tokens)
    new = jnp.asarray(rng.standard_normal((num_tokens, 1, 8)), jnp.bfloat16)
    args = k, k, new, 2 * new, jnp.asarray(slots, jnp.int32)
    actual = append_paged_kv(*args, implementation="mosaic_gpu", config=config)
    same_bits(actual, append_paged_kv(*args, implementation="xla"))
    assert np.count_nonzero(np.asarray(actual[0]).any(axis=-1)) == len(np.unique(slots[slots >= 0]))


@pytest.mark.parametrize(
    ("num_tokens", "config"),
    [
        (1024, Config(16, 4, 3)),
        (1152, Config(8, 2, 99)),
        (1100, Config(16, 1, 3, 2)),
        (1100, Config(8, 2, 3, 2)),
        (700, Config(2, 1, 1)),
    ],
)
def test_equal_slots_far_apart_in_the_kernel(num_tokens, config):
    """Pairs at many distances, within a tile, a block, and across blocks; all other tokens are kept."""
    if testing.interpreting("mosaic_gpu"):
        num_tokens //= 4  # each costs milliseconds
    rng = np.random.default_rng(num_tokens)
    slots = rng.permutation(2 * num_tokens)[:num_tokens]
    for distance in (1, 7, 40, 127, 128, num_tokens // 3, num_tokens - 40):
        first = rng.integers(0, num_tokens - distance, 3)
        slots[first] = slots[first + distance]
    slots[-1] = slots[0]
    slots[100:104] = -1
    check_equal_slots(slots, config)


def test_equal_slots_whose_hashes_meet():
    """Multiples of a large power of two have few hashes, so that entries of the table are passed by."""
    few = np.arange(64) * 2**14 + 3
    slots = np.concatenate([few, few[::3], np.arange(40)])
    check_equal_slots(slots, Config(16, 4, 1))
    check_equal_slots(np.full(70, 5), Config(4, 1, 3))


def test_default_config():
    def config(num_tokens, pool_dtype="bfloat16"):
        pool = jax.ShapeDtypeStruct((4096, 8, 16, 128), pool_dtype)
        new = jax.ShapeDtypeStruct((num_tokens, 8, 128), "bfloat16")
        slots = jax.ShapeDtypeStruct((num_tokens,), "int32")
        record = explain(append_paged_kv, pool, pool, new, new, slots, target="sm_90")
        assert record.smem_bytes <= record.target.smem_bytes
        return record.config

    assert config(128) == Config(2, 1, 64)
    assert config(16384) == Config(4, 4, 132, 2)
    # The table of so many slots leaves room for smaller tiles only.
    assert config(40000, "int8") == Config(2, 4, 132, 2)


def test_slots_at_the_ends_of_int32():
    """Differences of slots that overflow: no token is lost, nor kept, by those that are to be skipped."""
    least, largest = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    k, v, k_new, v_new, _ = small(num_tokens=7)
    for skipped in ((least, largest, -1), (largest, 192, least), (-1, -1, -1)):
        slots = jnp.asarray([0, skipped[0], 191, 0, skipped[1], 5, skipped[2]], jnp.int32)
        args = k, v, k_new, v_new, slots
        for config in (Config(2), Config(8)):
            actual = append_paged_kv(*args, implementation="mosaic_gpu", config=config)
            same_bits(actual, append_paged_kv(*args, implementation="xla"))


@pytest.mark.parametrize("name", ["rope_e4m3_partial", "e4m3_token"])
def test_two_stages(name):
    """Tiles of rotated, converted and scaled rows follow one another in the same memory."""
    inputs = make_append_inputs(dataclasses.replace(append_case(name), num_tokens=70))
    config = Config(4, 2, 2, num_stages=2)
    actual = inputs.call(jax_paged_attn, implementation="mosaic_gpu", config=config)
    assert_appended(inputs, actual, inputs.call(reference))


@pytest.mark.parametrize("threads", [None, 2])
def test_warpgroups_where_the_interpreter_has_few_threads(monkeypatch, threads):
    """It would hang: one warpgroup then does it all."""
    if threads is not None:
        monkeypatch.setenv("NPROC", str(threads))
    check_equal_slots(np.arange(40) // 2, Config(4, 4, 2))


@pytest.mark.parametrize(("max_tokens", "num_tokens"), [(32, 70), (128, 130)])
def test_several_launches_in_order(monkeypatch, max_tokens, num_tokens):
    monkeypatch.setattr(kernel, "MAX_TOKENS", max_tokens)
    inputs = make_append_inputs(dataclasses.replace(append_case("rope_e4m3_partial"), num_tokens=num_tokens))
    jax.clear_caches()
    actual = inputs.call(jax_paged_attn, implementation="mosaic_gpu")
    jax.clear_caches()
    assert_appended(inputs, actual, inputs.call(reference))


def temporary_bytes(compiled):
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def pool_copies(compiled, pool):
    """How many copies of an array like `pool` there are in a compiled program."""
    dims = ",".join(map(str, pool.shape))
    return len(re.findall(rf"\[{dims}\]\S* (?:copy|copy-start)\(", compiled.as_text()))


@pytest.mark.parametrize("kv_layout", ["HND", "NHD", "HPND"])
def test_in_place_where_the_caller_donates(kv_layout):
    k, v, k_new, v_new, slots = small(kv_layout, num_pages=4096)
    append = functools.partial(append_paged_kv, kv_layout=kv_layout)
    compiled = jax.jit(append, donate_argnums=(0, 1)).lower(k, v, k_new, v_new, slots).compile()
    assert pool_copies(compiled, k) == 0
    assert "input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }" in str(
        compiled.as_text()
    )
    assert temporary_bytes(compiled) < k.nbytes // 100
    kept = jax.jit(append).lower(k, v, k_new, v_new, slots).compile()
    assert pool_copies(kept, k) == 2  # so that copies are seen where there are any


def test_in_place_through_a_scan_over_steps():
    k, v, k_new, v_new, slots = small(num_pages=4096)

    def generate(pools, k_new, v_new, slots):
        def step(pools, token):
            k, v = pools
            k_new, v_new, slots = (x[None] for x in token)
            return append_paged_kv(k, v, k_new, v_new, slots), None

        return jax.lax.scan(step, pools, (k_new, v_new, slots))[0]

    compiled = jax.jit(generate, donate_argnums=0).lower((k, v), k_new, v_new, slots).compile()
    assert pool_copies(compiled, k) == 0
    assert temporary_bytes(compiled) < k.nbytes // 100
    same_bits(jax.jit(generate)((k, v), k_new, v_new, slots), append_paged_kv(k, v, k_new, v_new, slots))


def stacked(*args, size=3):
    """The arguments `size` times, each a little different, slots shuffled."""

    def each(i, x):
        if x.dtype == jnp.int32:
            return jnp.roll(x, i)
        return jnp.roll(x, i, axis=-1)

    return [jnp.stack([each(i, x) for i in range(size)]) for x in args]


@pytest.mark.newest
@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("kv_layout", ["HND", "HPND"])
@pytest.mark.parametrize(
    "mapped", [(0, 0, 0, 0, 0), (None, None, 0, 0, 0), (0, 0, None, None, None), (0, None, 0, 0, None)]
)
def test_vmap_gives_each_element_its_pool(implementation, kv_layout, mapped):
    one = small(kv_layout)
    args = [many if axis == 0 else x for x, many, axis in zip(one, stacked(*one), mapped, strict=True)]
    append = functools.partial(append_paged_kv, kv_layout=kv_layout, implementation=implementation)
    actual = jax.vmap(append, in_axes=mapped)(*args)
    elements = ([x[i] if axis == 0 else x for x, axis in zip(args, mapped, strict=True)] for i in range(3))
    expected = [append_paged_kv(*each, kv_layout=kv_layout, implementation="xla") for each in elements]
    same_bits(actual, jax.tree.map(lambda *x: jnp.stack(x), *expected))


@pytest.mark.parametrize("implementation", NAMES)
def test_nested_vmap_and_empty_vmap(implementation):
    one = small()
    args = [x[None] for x in stacked(*one)]
    append = functools.partial(append_paged_kv, implementation=implementation)
    actual = jax.vmap(jax.vmap(append))(*args)
    expected = [append_paged_kv(*(x[0, i] for x in args), implementation="xla") for i in range(3)]
    same_bits(actual, jax.tree.map(lambda *x: jnp.stack(x)[None], *expected))
    none = jax.vmap(append)(*(x[0, :0] for x in args))
    chex.assert_shape(none, (0, *one[0].shape))


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("scale", ["tensor", "head", "token"])
@pytest.mark.parametrize("mapped", [False, True])
def test_vmap_of_a_quantizing_rotating_append(implementation, scale, mapped):
    case = dataclasses.replace(
        append_case("rope_e4m3"), name=f"vmap_{scale}", num_tokens=3, scale=scale, head_dim=64
    )
    inputs = make_append_inputs(case)
    arrays = {name: x for name, x in inputs.options.items() if hasattr(x, "shape")}
    options = {name: x for name, x in inputs.options.items() if name not in arrays}

    def append(args, arrays, implementation=implementation):
        return rope_append_paged_kv(*args, **arrays, **options, implementation=implementation)

    many = [jnp.stack([x, x[::-1]]) for x in inputs.args]
    axes = {name: 0 if mapped or (scale == "token" and "scale" in name) else None for name in arrays}
    scales = {name: jnp.stack([x, x * 2]) if axes[name] == 0 else x for name, x in arrays.items()}
    actual = jax.jit(jax.vmap(append, in_axes=(0, axes)))(many, scales)
    for i in range(2):
        each = {name: x[i] if axes[name] == 0 else x for name, x in scales.items()}
        expected = jax.jit(functools.partial(append, implementation="xla"))([x[i] for x in many], each)
        chex.assert_trees_all_close(
            [x[i].astype(jnp.float32) for x in actual], [x.astype(jnp.float32) for x in expected], rtol=0.13
        )


@pytest.mark.parametrize("implementation", NAMES)
def test_nothing_to_write(implementation):
    k, v, k_new, v_new, slots = small()
    append = functools.partial(append_paged_kv, implementation=implementation)
    same_bits(append(k, v, k_new[:0], v_new[:0], slots[:0]), (k, v))
    same_bits(append(k[:0], v[:0], k_new, v_new, slots), (k[:0], v[:0]))
    q, *pools = rope_append_paged_kv(
        k_new[:0], k_new[:0], v_new[:0], slots[:0], k, v, slots[:0], inv_freq=rope_frequencies(64)
    )
    chex.assert_shape(q, (0, 2, 64))
    same_bits(pools, (k, v))


def test_rotation_over_an_empty_pool():
    k, v, k_new, v_new, slots = small()
    args = (k_new, k_new, v_new, slots, k[:0], v[:0], slots)
    q, *pools = rope_append_paged_kv(*args, inv_freq=rope_frequencies(64))
    chex.assert_shape((q, *pools), [k_new.shape, k[:0].shape, v[:0].shape])
    with pytest.raises(NotImplementedError, match="needs a pool with pages"):
        rope_append_paged_kv(*args, inv_freq=rope_frequencies(64), implementation="mosaic_gpu")


def test_one_compile_serves_all_slots():
    k, v, k_new, v_new, slots = small()
    traced = chex.assert_max_traces(append_paged_kv, n=1)
    append = jax.jit(traced)
    for shift in range(3):
        append(k, v, k_new, v_new, slots + shift)


@pytest.mark.parametrize("x64", [False, True])
def test_wide_integers_are_cast_safely(x64):
    k, v, k_new, v_new, slots = small()
    expected = append_paged_kv(k, v, k_new, v_new, slots)
    with jax.enable_x64(x64):
        wide = np.asarray(slots).astype(np.int64)
        wide[3] = 2**32 + 5  # would wrap around to slot 5
        same_bits(append_paged_kv(k, v, k_new, v_new, wide), expected)
        assert (
            slot_mapping(PageTable.from_block_tables([[1]], [3]), np.array([0]), [2], page_size=4).dtype
            == np.int32
        )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k_pages", {"k_pages": lambda x: x[0]}),
        ("v_pages", {"v_pages": lambda x: x[:, :, :8]}),
        ("k_pages", {"k_pages": lambda x: x.astype(jnp.float32)}),
        ("k_pages", {"k_pages": lambda x: x.astype(jnp.int16)}),
        ("k_new", {"k_new": lambda x: x[:, :1]}),
        ("slot_mapping", {"k_new": lambda x: x[:2], "v_new": lambda x: x[:2]}),
        ("v_new", {"v_new": lambda x: x[:2]}),
        ("k_new", {"k_new": lambda x: x.astype(jnp.int32)}),
        ("v_new", {"v_new": lambda x: x[..., :32]}),
        ("v_new", {"v_new": lambda x: x.astype(jnp.float16), "v_pages": lambda x: x.astype(jnp.float16)}),
        ("slot_mapping", {"slot_mapping": lambda x: x[None]}),
        ("slot_mapping", {"slot_mapping": lambda x: x.astype(jnp.float32)}),
        ("k_scale", {"k_scale": 0.5}),
        ("v_scale", {"v_scale": 0.5}),
        ("kv_layout", {"kv_layout": "HDN"}),
        ("validate_values", {"validate_values": 1}),
        ("implementation", {"implementation": "cuda"}),
        ("config", {"config": 3}),
    ],
)
def test_wrong_arguments(name, change):
    names = ("k_pages", "v_pages", "k_new", "v_new", "slot_mapping")
    arguments = dict(zip(names, small(), strict=True))
    arguments |= {key: value(arguments[key]) if callable(value) else value for key, value in change.items()}
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+"):
        append_paged_kv(**arguments)


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("k_scale", {"k_scale": "0.5"}),
        ("k_scale", {"k_scale": True}),
        ("k_scale", {"k_scale": 1j}),
        ("k_scale", {"k_scale": jax.random.key(0)}),
        ("k_scale", {"k_scale": np.ones(3, np.float32)}),
        ("k_scale", {"k_scale": np.ones((2, 5), np.float32)}),
        ("k_scale_pages", {"k_scale": np.ones((5, 2), np.float32)}),
        ("k_scale", {"k_scale_pages": np.ones((12, 2, 16), np.float32)}),
        (
            "k_scale_pages",
            {"k_scale": np.ones((5, 2), np.float32), "k_scale_pages": np.ones((12, 16, 2), np.float32)},
        ),
        (
            "k_scale_pages",
            {"k_scale": np.ones((5, 2), np.float32), "k_scale_pages": np.ones((12, 2, 16), np.float16)},
        ),
    ],
)
def test_wrong_scales(name, scales):
    k, v, k_new, v_new, slots = small(pool_dtypes=("int8", "int8"))
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+"):
        append_paged_kv(k, v, k_new, v_new, slots, **scales)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("inv_freq, cos_sin", {}),
        ("inv_freq, cos_sin", {"inv_freq": np.ones(32, np.float32), "cos_sin": np.ones((9, 64), np.float32)}),
        ("inv_freq", {"inv_freq": np.ones((32, 1), np.float32)}),
        ("inv_freq", {"inv_freq": np.ones(32, np.int32)}),
        ("inv_freq", {"inv_freq": np.ones(33, np.float32)}),
        ("inv_freq", {"inv_freq": np.ones(0, np.float32)}),
        ("cos_sin", {"cos_sin": np.ones((9, 63), np.float32)}),
        ("rotary_dim", {"inv_freq": np.ones(32, np.float32), "rotary_dim": 32}),
        ("interleaved", {"inv_freq": np.ones(32, np.float32), "interleaved": None}),
        ("q", {"inv_freq": np.ones(32, np.float32), "q": lambda x: x[..., :32]}),
        ("q", {"inv_freq": np.ones(32, np.float32), "q": lambda x: x[:2]}),
        ("q", {"inv_freq": np.ones(32, np.float32), "q": lambda x: x[0]}),
        ("q", {"inv_freq": np.ones(32, np.float32), "q": lambda x: x[:, :0]}),
        ("cos_sin", {"cos_sin": np.ones((0, 64), np.float32)}),
        ("cos_sin", {"cos_sin": jnp.ones((9, 64), jnp.float8_e4m3fn)}),
        ("q", {"inv_freq": np.ones(32, np.float32), "q": lambda x: x.astype(jnp.float32)}),
        ("positions", {"inv_freq": np.ones(32, np.float32), "positions": lambda x: x[:2]}),
        ("positions", {"inv_freq": np.ones(32, np.float32), "positions": lambda x: x.astype(jnp.float32)}),
    ],
)
def test_wrong_rotation(name, options: dict[str, Any]):
    k, v, k_new, v_new, slots = small()
    arguments: dict[str, Any] = {"q": k_new, "k_new": k_new, "v_new": v_new, "positions": slots}
    arguments |= {"k_pages": k, "v_pages": v, "slot_mapping": slots}
    options = {key: value(arguments[key]) if callable(value) else value for key, value in options.items()}
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+"):
        rope_append_paged_kv(**(arguments | options))


def test_value_checks():
    k, v, k_new, v_new, slots = small(pool_dtypes=("int8", "int8"))
    past = slots.at[1].set(12 * 16)
    append_paged_kv(k, v, k_new, v_new, past)  # skipped
    append_paged_kv(k, v, k_new, v_new, slots, k_scale=0.5, v_scale=jnp.ones(2), validate_values=True)
    with pytest.raises(ValueError, match=r"^slot_mapping: expected slots below 192, .+got .*192"):
        append_paged_kv(k, v, k_new, v_new, past, validate_values=True)
    for scale in (0.0, -1.0, np.inf, np.nan, np.array([1, 0], np.float32)):
        with pytest.raises(ValueError, match=r"^v_scale: expected positive finite values"):
            append_paged_kv(k, v, k_new, v_new, slots, v_scale=scale, validate_values=True)
    rope = functools.partial(
        rope_append_paged_kv, k_new, k_new, v_new, cos_sin=jnp.ones((9, 64)), validate_values=True
    )
    with pytest.raises(ValueError, match=r"^positions: expected values in \[0, 9\)"):
        rope([0, 1, 2, 8, 9], k, v, slots)
    checked = jax.jit(checkify.checkify(functools.partial(append_paged_kv, validate_values=True)))
    error, _ = checked(k, v, k_new, v_new, past)
    with pytest.raises(ValueError, match="slot_mapping: expected slots below 192"):
        error.throw()
    checked(k, v, k_new, v_new, slots)[0].throw()


def test_no_derivative():
    k, v, k_new, v_new, slots = small(dtype="float32")
    with pytest.raises(
        NotImplementedError, match=r"append_paged_kv.*reference\.append_paged_kv is differentiable"
    ):
        jax.grad(lambda new: append_paged_kv(k, v, new, v_new, slots)[0].sum())(k_new)
    k = jnp.zeros_like(k)
    gradient = jax.grad(lambda new: reference.append_paged_kv(k, v, new, v_new, slots)[0].sum())(k_new)
    chex.assert_trees_all_equal(
        gradient[:, 0, 0], jnp.array([0.0, 1, 1, 0, 1])
    )  # the first token is overwritten


def test_explain():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), small())
    record = explain(append_paged_kv, *shapes, target="sm_90")
    assert record.implementation == "mosaic_gpu"
    assert 0 < record.smem_bytes < 232_448
    assert explain(append_paged_kv, *shapes, target="cpu").implementation == "xla"
    assert explain(append_paged_kv, *shapes, target="sm_80").implementation == "xla"
    inv_freq = jax.ShapeDtypeStruct((32,), "float32")
    q, slots = shapes[2], shapes[4]
    record = explain(
        rope_append_paged_kv,
        q,
        q,
        q,
        slots,
        *shapes[:2],
        slots,
        inv_freq=inv_freq,
        interleaved=True,
        target="sm_90",
    )
    assert dict(record.passed_over)["mosaic_gpu"] == "interleaved rotation unsupported"


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
@pytest.mark.parametrize("quantized", [False, True])
def test_append_kv(implementation, kv_layout, quantized):
    rng = np.random.default_rng(1)
    shape = (3, 2, 40, 64) if kv_layout == "HND" else (3, 40, 2, 64)
    dtype = "int8" if quantized else "bfloat16"
    k, v = (jnp.asarray(rng.integers(-99, 99, shape)).astype(dtype) for _ in "kv")
    k_new, v_new = (jnp.asarray(rng.standard_normal((3, 4, 2, 64)), jnp.bfloat16) for _ in "kv")
    options: dict[str, Any] = {"kv_layout": kv_layout}
    if quantized:
        for name in ("k", "v"):
            options[f"{name}_scale"] = jnp.asarray(rng.uniform(0.01, 0.1, (3, 4, 2)), jnp.float32)
            options[f"{name}_scale_cache"] = jnp.asarray(rng.uniform(0.01, 0.1, shape[:-1]), jnp.float32)
    for kv_lens in (np.array([0, 36, 38]), np.array([40, -2, 2**31 - 1]), np.int32(7)):
        actual = append_kv(k, v, k_new, v_new, kv_lens, **options, implementation=implementation)
        same_bits(actual, reference.append_kv(k, v, k_new, v_new, kv_lens, **options))
    rows: dict[str, Any] = {name: x[0] if hasattr(x, "shape") else x for name, x in options.items()}
    unbatched = append_kv(k[0], v[0], k_new[0], v_new[0], 38, **rows, implementation=implementation)
    same_bits(unbatched, reference.append_kv(k[0], v[0], k_new[0], v_new[0], 38, **rows))


def test_append_at_a_full_cache_changes_nothing():
    k = v = jnp.ones((2, 2, 8, 64))
    same_bits(append_kv(k, v, 2 * jnp.ones((2, 1, 2, 64)), 2 * jnp.ones((2, 1, 2, 64)), [8, 9]), (k, v))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k_cache", {"k_cache": np.ones((3, 2, 8, 64), np.float32)}),
        ("v_cache", {"v_cache": np.ones((2, 8, 64), np.float32)}),
        ("k_new", {"k_new": np.ones((2, 2, 64, 1, 1), np.float32)}),
        ("k_new", {"k_new": np.ones((2, 1, 3, 64), np.float32), "v_new": np.ones((2, 1, 3, 64), np.float32)}),
        ("v_new", {"v_new": np.ones((2, 2, 2, 64), np.float32)}),
        ("kv_lens", {"kv_lens": [1, 2, 3]}),
        ("kv_lens", {"kv_lens": [1.0, 2.0]}),
        ("kv_lens", {"kv_lens": [7, 8], "validate_values": True}),
        ("kv_lens", {"kv_lens": -1, "validate_values": True}),
        ("kv_layout", {"kv_layout": "HPND"}),
        ("k_cache", {"k_cache": np.ones((2, 2, 8, 64), np.float16)}),
        ("k_scale", {"k_scale": np.ones((2, 3, 2), np.float32)}),
    ],
)
def test_wrong_arguments_of_append_kv(name, change):
    cache, new = np.ones((2, 2, 8, 64), np.float32), np.ones((2, 1, 2, 64), np.float32)
    arguments = {"k_cache": cache, "v_cache": cache, "k_new": new, "v_new": new, "kv_lens": [1, 2]}
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+"):
        append_kv(**(arguments | change))


def test_slot_mapping_stays_in_the_rows_own_pages():
    """Positions past a row's table would be the next row's pages."""
    table = PageTable.from_block_tables([[5, 6], [7, 8], [-1, 2**31 - 1]], [32, 20, 32])
    rows = np.array([0, 0, 0, 1, 1, 1, 2, 2, -1, 3])
    positions = np.array([31, 32, -1, 16, 19, 20, 0, 16, 0, 0])
    expected = [6 * 16 + 15, -1, -1, 8 * 16, 8 * 16 + 3, -1, -1, -1, -1, -1]
    assert slot_mapping(table, rows, positions, page_size=16).tolist() == expected
    for length in (40, 2**31 - 1):  # longer than its pages
        longer = dataclasses.replace(table, kv_lens=jnp.array([length, 20, 32], jnp.int32))
        assert slot_mapping(longer, rows, positions, page_size=16).tolist() == expected
    chex.assert_trees_all_equal(
        slot_mapping(table, rows, positions, page_size=16),
        reference.slot_mapping(table, rows, positions, page_size=16),
    )


@hypothesis.given(st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=30)
def test_slot_mapping_matches_the_reference(seed):
    rng = np.random.default_rng(seed)
    wild = [-(2**31), -1, 0, 1, 2, 3, 7, 100, 2**31 - 1]
    indices, row_starts, row_pages, kv_lens = (
        jnp.asarray(rng.choice(wild, n), jnp.int32) for n in (9, 4, 4, 4)
    )
    table = PageTable(indices, row_starts, row_pages, kv_lens)
    rows, positions = rng.integers(-1, 5, 20), rng.choice([*wild, 5, 15, 16, 17], 20)
    page_size = int(rng.choice([1, 3, 16, 2**31 - 1]))
    chex.assert_trees_all_equal(
        slot_mapping(table, rows, positions, page_size=page_size),
        reference.slot_mapping(table, rows, positions, page_size=page_size),
    )


def test_slot_mapping_of_unbatched_and_empty_tables():
    row = PageTable.from_block_tables([4, 2], 20)
    assert slot_mapping(row, [0, 0, 1], [0, 19, 0], page_size=16).tolist() == [64, 35, -1]
    empty = PageTable.from_block_tables(np.zeros((0, 2), np.int32), np.zeros(0, np.int32))
    assert slot_mapping(empty, [0], [0], page_size=16).tolist() == [-1]
    assert slot_mapping(row, np.zeros(0, np.int32), np.zeros(0, np.int32), page_size=16).shape == (0,)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("page_table", {"page_table": [[1, 2]]}),
        ("batch_indices", {"batch_indices": [[0]]}),
        ("positions", {"positions": [0, 1]}),
        ("positions", {"positions": [0.5]}),
        ("page_size", {"page_size": 0}),
        ("page_size", {"page_size": 2**31}),
        ("batch_indices, positions", {"positions": [20], "validate_values": True}),
        ("batch_indices, positions", {"batch_indices": [1], "validate_values": True}),
    ],
)
def test_wrong_arguments_of_slot_mapping(name, change):
    arguments = {
        "page_table": PageTable.from_block_tables([[4, 2]], [20]),
        "batch_indices": [0],
        "positions": [3],
    }
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+"):
        slot_mapping(**({"page_size": 16} | arguments | change))


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("kv_layout", ["HND", "NHD", "HPND"])
def test_attention_over_appended_tokens(implementation, kv_layout):
    """Token by token into shuffled pages, then attention: equals attention over the tokens themselves."""
    rng = np.random.default_rng(3)
    lens, page_size, heads, dim = np.array([5, 0, 17]), 4, 2, 64
    tables = rng.permutation(20)[:15].reshape(3, 5)
    sizes = {"num_pages": 20, "num_kv_heads": heads, "page_size": page_size, "head_dim": dim}
    pool = jnp.full([sizes[axis] for axis in LAYOUT_AXES[kv_layout]], jnp.nan, jnp.bfloat16)
    tokens = [jnp.asarray(rng.standard_normal((17, 3, heads, dim)), jnp.bfloat16) for _ in "kv"]
    k, v = pool, pool
    for position in range(17):
        table = PageTable.from_block_tables(tables, np.minimum(lens, position + 1))
        slots = slot_mapping(table, [0, 1, 2], [position] * 3, page_size=page_size)
        k_new, v_new = (x[position] for x in tokens)
        k, v = append_paged_kv(k, v, k_new, v_new, slots, kv_layout=kv_layout, implementation=implementation)
    q = jnp.asarray(rng.standard_normal((3, 4, dim)), jnp.bfloat16)
    table = PageTable.from_block_tables(tables, lens)
    paged = paged_attention(q, k, v, table, kv_layout=kv_layout, return_lse=True)
    k_cache, v_cache = (jnp.moveaxis(x, 0, 1) for x in tokens)
    expected = reference.decode_attention(q, k_cache, v_cache, lens, kv_layout="NHD", return_lse=True)
    testing.assert_close(paged, expected)


@pytest.mark.newest
def test_symbolic_sizes():
    def append(k, v, k_new, v_new, slots):
        return append_paged_kv(k, v, k_new, v_new, slots)

    pages, tokens = jax.export.symbolic_shape("pages, tokens")
    pool, new = ((n, *rest) for n, rest in ((pages, (2, 16, 64)), (tokens, (2, 64))))
    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in (pool, pool, new, new)]
    exported = jax.export.export(jax.jit(append))(*shapes, jax.ShapeDtypeStruct((tokens,), "int32"))
    args = small()
    same_bits(exported.call(*args), append_paged_kv(*args))


def test_huge_pools():
    """Slots are int32; the part of a larger pool that they reach is written."""
    shape = jax.ShapeDtypeStruct
    pool, new, slots = (
        shape((2**21, 2, 2048, 64), "bfloat16"),
        shape((5, 2, 64), "bfloat16"),
        shape((5,), "int32"),
    )
    for module in (jax_paged_attn, reference):
        chex.assert_shape(jax.eval_shape(module.append_paged_kv, pool, pool, new, new, slots), pool.shape)
    cache = shape((2**20, 2, 2048, 64), "bfloat16")
    with pytest.raises(ValueError, match=r"^k_cache: expected fewer than 2\*\*31 tokens"):
        jax.eval_shape(
            append_kv,
            cache,
            cache,
            shape((2**20, 1, 2, 64), "bfloat16"),
            shape((2**20, 1, 2, 64), "bfloat16"),
            0,
        )


def test_shapes_are_told_as_they_were_given():
    k, v, *_ = small()
    cache = k[0], v[0]
    with pytest.raises(ValueError, match=r"k_new: expected shape \(3, 2, 64\), got shape \(3, 1, 64\)"):
        append_kv(*cache, k[:3, :1, 0], v[:3, :1, 0], 2)
    new, cache = jnp.ones((2, 3, 2, 64)), jnp.zeros((2, 2, 9, 64), jnp.int8)
    message = r"k_scale: expected shape \(\) or \(2,\) or \(2, 3, 2\), got shape \(6, 2\)"
    with pytest.raises(ValueError, match=message):
        append_kv(cache, cache, new, new, 0, k_scale=jnp.ones((6, 2)))


def test_arguments_on_the_device_stay_there():
    k, v, k_new, v_new, slots = (jax.device_put(x) for x in small())
    cache, new, lens = k[:1], k_new[None], jax.device_put(np.array([3], np.int32))
    inv_freq = rope_frequencies(64)
    table = PageTable.from_block_tables(jnp.array([[1, 2]]), jnp.array([20]))
    with jax.transfer_guard("disallow"):
        rotated = apply_rope(k_new, slots, inv_freq=inv_freq)
        append_paged_kv(k, v, rotated, v_new, slots)
        append_kv(cache, cache, new, new, lens)
        slot_mapping(table, slots, slots, page_size=16)
        rope_cos_sin(rope_frequencies(64), 9)


@pytest.mark.newest
@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map(check_vma):
    """Kv heads over a mesh; kernels take no arrays that JAX tracks as varying, so XLA serves these."""
    k, v, k_new, v_new, slots = small()
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    heads = jax.P(None, "heads")
    append = jax.shard_map(
        append_paged_kv,
        mesh=mesh,
        in_specs=(heads, heads, heads, heads, jax.P()),
        out_specs=(heads, heads),
        check_vma=check_vma,
    )
    same_bits(jax.jit(append)(k, v, k_new, v_new, slots), append_paged_kv(k, v, k_new, v_new, slots))
    q = k_new
    attend = jax.shard_map(
        paged_attention,
        mesh=mesh,
        in_specs=(heads, heads, heads, jax.P()),
        out_specs=heads,
        check_vma=check_vma,
    )
    table = PageTable.from_block_tables(np.arange(5)[:, None] % 12, np.full(5, 9))
    k, v = (jnp.nan_to_num(x) for x in (k, v))
    chex.assert_trees_all_close(jax.jit(attend)(q, k, v, table), paged_attention(q, k, v, table))
    if check_vma:
        with pytest.raises(NotImplementedError, match="check_vma=False"):
            jax.shard_map(
                functools.partial(append_paged_kv, implementation="mosaic_gpu"),
                mesh=mesh,
                in_specs=(heads, heads, heads, heads, jax.P()),
                out_specs=(heads, heads),
            )(k, v, k_new, v_new, slots)


@pytest.mark.parametrize("name", ["page_size", "pages"])
def test_vmap_of_empty_pools(name):
    k, v, k_new, v_new, slots = stacked(*small())
    k, v = (x[:, :, :, :0] if name == "page_size" else x[:, :0] for x in (k, v))
    same_bits(jax.vmap(append_paged_kv)(k, v, k_new, v_new, slots), (k, v))


@pytest.mark.newest
def test_symbolic_sizes_under_vmap():
    """What the mapped axis makes of slots can't be compared with int32's limit."""
    batch, pages = jax.export.symbolic_shape("batch, pages")
    shapes = [(batch, pages, 2, 16, 64)] * 2 + [(batch, 5, 2, 64)] * 2
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    exported = jax.export.export(jax.jit(jax.vmap(append_paged_kv)))(
        *arrays, jax.ShapeDtypeStruct((batch, 5), "int32")
    )
    args = stacked(*small())
    same_bits(exported.call(*args), jax.vmap(append_paged_kv)(*args))


def test_explain_with_a_kernels_config():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), small())
    assert explain(append_paged_kv, *shapes, config=Config(8), target="sm_90").config == Config(8)
    with pytest.raises(ValueError, match=r"^config: expected a .*xla\.append\.Config"):
        explain(append_paged_kv, *shapes, config=Config(8), target="cpu")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_untouched_slots_of_float8_keep_their_bits(dtype):
    """Which NaN included, also where XLA writes."""
    k, v, k_new, v_new, slots = small(pool_dtypes=(dtype, dtype))
    bits = jnp.arange(k.size, dtype=jnp.uint8).reshape(k.shape)
    pool = jax.lax.bitcast_convert_type(bits, k.dtype)
    for implementation in NAMES:
        after, _ = append_paged_kv(pool, v, k_new, v_new, slots, implementation=implementation)
        untouched = np.asarray(after)[3:5].view(np.uint8)
        assert (untouched == np.asarray(bits)[3:5]).all()


def test_scales_of_tokens_for_keys_alone():
    k, v, k_new, v_new, slots = small(pool_dtypes=("int8", "bfloat16"))
    scales, pages = jnp.full((5, 2), 0.1), jnp.zeros((12, 2, 16))
    results = append_paged_kv(k, v, k_new, v_new, slots, k_scale=scales, k_scale_pages=pages)
    assert len(results) == 3
    same_bits(
        results, reference.append_paged_kv(k, v, k_new, v_new, slots, k_scale=scales, k_scale_pages=pages)
    )


@pytest.mark.newest
def test_symbolic_rotation():
    """Of which the kernel must not be asked."""
    heads, positions = jax.export.symbolic_shape("heads, positions")
    k, v, k_new, v_new, slots = small()
    q, table = jnp.concatenate([k_new] * 3, axis=1), rope_cos_sin(rope_frequencies(64), 50)

    def call(q, table, k_new, v_new, positions, k, v, slots):
        return rope_append_paged_kv(q, k_new, v_new, positions, k, v, slots, cos_sin=table)

    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((5, heads, 64), q.dtype), ((positions, 64), table.dtype))
    ]
    rest = (k_new, v_new, slots, k, v, slots)
    exported = jax.export.export(jax.jit(call))(*shapes, *rest)
    same_bits(exported.call(q, table, *rest), jax.jit(call)(q, table, *rest))


def test_numpy_integers_in_a_config():
    eight: Any = np.int64(8)
    assert Config(eight) == Config(8)
    args = small()
    same_bits(
        append_paged_kv(*args, implementation="mosaic_gpu", config=Config(eight)), append_paged_kv(*args)
    )


def test_explain_names_a_config_that_cannot_be_hashed():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), small())
    with pytest.raises(ValueError, match=r"^config: expected a "):
        explain(append_paged_kv, *shapes, config=[1], target="sm_90")
