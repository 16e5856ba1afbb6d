import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jax_paged_attn import PageTable, decode_attention, paged_attention

TABLE = PageTable.from_block_tables([[0, 1], [2, 3]], [20, 3])
PAGED: dict[str, Any] = {
    "q": jnp.ones((2, 4, 64)),
    "k_pages": jnp.ones((5, 2, 16, 64)),
    "v_pages": jnp.ones((5, 2, 16, 64)),
    "page_table": TABLE,
}
CONTIGUOUS: dict[str, Any] = {
    "q": jnp.ones((2, 4, 64)),
    "k_cache": jnp.ones((2, 2, 16, 64)),
    "v_cache": jnp.ones((2, 2, 16, 64)),
    "kv_lens": jnp.array([5, 16]),
}


def table_with(**fields) -> dict[str, Any]:
    return {"page_table": dataclasses.replace(TABLE, **fields)}


SHARED_MISTAKES = [
    ({"q": jnp.ones((2, 1, 1, 4, 64))}, "q"),
    ({"q": jnp.ones(64)}, "q"),
    ({"q": jnp.ones((2, 4, 64), jnp.int32)}, "q"),
    ({"q": jnp.ones((2, 3, 64))}, "q"),
    ({"q": jnp.ones((2, 0, 64))}, "q"),
    ({"q": "query"}, "q"),
    ({"q": None}, "q"),
    ({"q": 2**70}, "q"),
    ({"q": [2**70]}, "q"),
    ({"q": np.array([1, 2], "datetime64[s]")}, "q"),
    ({"sm_scale": "x"}, "sm_scale"),
    ({"sm_scale": [2**70]}, "sm_scale"),
    ({"sm_scale": np.timedelta64(1, "s")}, "sm_scale"),
    ({"sm_scale": np.datetime64(1, "s")}, "sm_scale"),
    ({"kv_starts": [2**70, 0]}, "kv_starts"),
    ({"kv_starts": np.array([0, 0], "timedelta64[s]")}, "kv_starts"),
    ({"sm_scale": "1"}, "sm_scale"),
    ({"sm_scale": 1j}, "sm_scale"),
    ({"sm_scale": True}, "sm_scale"),
    ({"sm_scale": jnp.ones(1)}, "sm_scale"),
    ({"sm_scale": np.array(True)}, "sm_scale"),
    ({"sm_scale": [0.5]}, "sm_scale"),
    ({"kv_starts": [0.0, 1.0]}, "kv_starts"),
    ({"kv_starts": [0, 1, 2]}, "kv_starts"),
    ({"kv_starts": 0}, "kv_starts"),
    ({"kv_layout": "hnd"}, "kv_layout"),
    ({"kv_layout": None}, "kv_layout"),
    ({"return_lse": 1}, "return_lse"),
    ({"validate_values": "yes"}, "validate_values"),
    ({"num_splits": 0}, "num_splits"),
    ({"num_splits": 1.0}, "num_splits"),
    ({"num_splits": True}, "num_splits"),
    ({"implementation": "cuda"}, "implementation"),
    ({"implementation": 1}, "implementation"),
    ({"implementation": ["xla"]}, "implementation"),
    ({"config": 128}, "config"),
    ({"config": {"block_kv": 64}, "implementation": "xla"}, "config"),
]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        *SHARED_MISTAKES,
        ({"k_pages": jnp.ones((5, 2, 16))}, "k_pages"),
        ({"v_pages": jnp.ones((5, 2, 16))}, "v_pages"),
        ({"k_pages": jnp.ones((5, 2, 16, 32))}, "k_pages"),
        ({"k_pages": jnp.ones((5, 2, 16, 64), jnp.bfloat16)}, "k_pages"),
        ({"v_pages": jnp.ones((5, 2, 16, 64), jnp.bfloat16)}, "v_pages"),
        ({"v_pages": jnp.ones((5, 2, 16, 0))}, "v_pages"),
        ({"v_pages": jnp.ones((5, 1, 16, 64))}, "v_pages"),
        ({"v_pages": jnp.ones((5, 2, 8, 64))}, "v_pages"),
        ({"v_pages": jnp.ones((6, 2, 16, 64))}, "v_pages"),
        ({"k_pages": jnp.ones((5, 0, 16, 64)), "v_pages": jnp.ones((5, 0, 16, 64))}, "k_pages"),
        ({"page_table": [[0, 1], [2, 3]]}, "page_table"),
        ({"q": jnp.ones((3, 4, 64))}, "page_table"),
        ({"q": jnp.ones((4, 64))}, "page_table"),
        ({"page_table": PageTable.from_block_tables([0, 1], 20)}, "page_table"),
        (table_with(indices=jnp.ones(4)), "page_table.indices"),
        (table_with(indices=jnp.ones((2, 2), jnp.int32)), "page_table.indices"),
        (table_with(kv_lens=jnp.ones(2)), "page_table.kv_lens"),
        (table_with(kv_lens=jnp.ones((1, 2), jnp.int32)), "page_table.kv_lens"),
        (table_with(row_starts=jnp.ones(3, jnp.int32)), "page_table.row_starts"),
        (table_with(row_pages=jnp.ones((), jnp.int32)), "page_table.row_pages"),
    ],
)
def test_paged_attention_names_the_wrong_argument(change, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+"):
        paged_attention(**(PAGED | change))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        *SHARED_MISTAKES,
        ({"kv_layout": "HPND"}, "kv_layout"),
        ({"k_cache": jnp.ones((2, 16, 64))}, "k_cache"),
        ({"k_cache": jnp.ones((3, 2, 16, 64))}, "k_cache"),
        ({"k_cache": jnp.ones((2, 2, 16, 32))}, "k_cache"),
        ({"v_cache": jnp.ones((2, 2, 15, 64))}, "v_cache"),
        ({"v_cache": jnp.ones((2, 2, 16, 64), jnp.float16)}, "v_cache"),
        ({"kv_lens": jnp.ones(2)}, "kv_lens"),
        ({"kv_lens": [1, 2, 3]}, "kv_lens"),
        ({"kv_lens": [[1, 2]]}, "kv_lens"),
        ({"kv_lens": None}, "kv_lens"),
        ({"q": jnp.ones((4, 64))}, "k_cache"),
    ],
)
def test_decode_attention_names_the_wrong_argument(change, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+"):
        decode_attention(**(CONTIGUOUS | change))


@pytest.mark.parametrize("sm_scale", ["x", [2**70], NotImplemented, np.timedelta64(1, "s")])
def test_what_is_no_scale_is_told_what_one_is(sm_scale):
    with pytest.raises(ValueError, match=r"^sm_scale: expected a real scalar or None, got "):
        paged_attention(**PAGED, sm_scale=sm_scale)


def test_a_huge_int_beside_a_traced_one():
    def call(n):
        mistake: dict[str, Any] = {"kv_lens": [n, 2**70]}
        return decode_attention(**(CONTIGUOUS | mistake))

    with pytest.raises(ValueError, match=r"^kv_lens: expected an integer array, got list"):
        jax.jit(call)(3)


def test_heads_that_do_not_divide():
    mistake: dict[str, Any] = {"q": jnp.ones((2, 5, 64))}
    with pytest.raises(ValueError, match="num_kv_heads=2 of k_pages in kv_layout='HND', got num_q_heads=5"):
        paged_attention(**(PAGED | mistake))


def test_float64_is_refused():
    with jax.enable_x64(True):
        wide = {name: PAGED[name].astype("float64") for name in ("q", "k_pages", "v_pages")}
        with pytest.raises(ValueError, match=r"^q: expected .*float32.*, got dtype float64"):
            paged_attention(**(PAGED | wide))


@pytest.mark.parametrize(
    "sm_scale",
    [1, 0.0, -0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), jnp.float32(0.5), jnp.int32(1)],
)
def test_every_real_scalar_is_a_scale(sm_scale):
    paged_attention(**PAGED, sm_scale=sm_scale)


def ints(*values):
    return jnp.array(values, jnp.int32)


# Each change leaves shapes alone and makes one value wrong.
BAD_VALUES = [
    (table_with(indices=ints(0, 5, 2, 3)), "page_table.indices"),
    (table_with(indices=ints(0, -1, 2, 3)), "page_table.indices"),
    (table_with(kv_lens=ints(33, 3)), "page_table.kv_lens"),
    (table_with(kv_lens=ints(20, -1)), "page_table.kv_lens"),
    (table_with(kv_lens=ints(2**31 - 1, 3)), "page_table.kv_lens"),
    (table_with(row_starts=ints(0, 3)), "page_table.row_starts"),
    (table_with(row_starts=ints(-1, 2)), "page_table.row_starts"),
    (table_with(row_starts=ints(0, 2**31 - 1)), "page_table.row_starts"),
    (table_with(row_pages=ints(2, 5)), "page_table.row_pages"),
    (table_with(row_pages=ints(-1, 2)), "page_table.row_pages"),
    ({"kv_starts": ints(-1, 0)}, "kv_starts"),
    ({"kv_starts": ints(0, 4)}, "kv_starts"),
]
GOOD_VALUES: list[dict[str, Any]] = [
    {},
    table_with(indices=ints(0, 1, 2, -1)),
    table_with(indices=ints(0, 1, 2, 2**31 - 1)),
    table_with(indices=ints(-1, -1, 2, 3), kv_lens=ints(0, 32)),
    table_with(row_starts=ints(2, 2)),
    table_with(row_starts=ints(2, 4), row_pages=ints(2, 0), kv_lens=ints(32, 0)),
    {"kv_starts": ints(20, 0)},
]


def checked(arguments):
    return paged_attention(**arguments, validate_values=True, implementation="xla")


@pytest.mark.parametrize(("change", "name"), BAD_VALUES)
def test_wrong_values(change, name):
    arguments = PAGED | change
    paged_attention(**arguments, implementation="xla")  # clipped where nobody asked for checks
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got "):
        checked(arguments)
    error, _ = jax.jit(checkify.checkify(checked))(arguments)
    assert f"{name}: expected " in error.get()


@pytest.mark.parametrize("change", GOOD_VALUES)
def test_right_values(change):
    arguments = PAGED | change
    checked(arguments)
    error, _ = jax.jit(checkify.checkify(checked))(arguments)
    assert error.get() is None


def test_value_checks_under_vmap():
    def call(kv_lens):
        return checked(PAGED | table_with(kv_lens=kv_lens))

    # In this order: checkify can't look into a while loop whose length vmap made differ.
    mapped = jax.jit(jax.vmap(checkify.checkify(call)))
    assert mapped(jnp.array([[20, 3], [32, 0]]))[0].get() is None
    assert "page_table.kv_lens" in mapped(jnp.array([[20, 3], [33, 0]]))[0].get()


def test_value_checks_with_the_default_implementation():
    def call(arguments):
        return paged_attention(**arguments, validate_values=True)

    error, _ = jax.jit(checkify.checkify(call))(PAGED | table_with(kv_lens=ints(33, 0)))
    assert "page_table.kv_lens" in error.get()


@pytest.mark.parametrize(("kv_lens", "fails"), [((0, 16), False), ((17, 3), True), ((3, -1), True)])
def test_contiguous_lengths(kv_lens, fails):
    def call(kv_lens):
        return decode_attention(**(CONTIGUOUS | {"kv_lens": kv_lens}), validate_values=True)

    error, _ = jax.jit(checkify.checkify(call))(jnp.array(kv_lens))
    assert ("kv_lens: expected" in (error.get() or "")) == fails
    if fails:
        with pytest.raises(ValueError, match=r"^kv_lens: expected values in .*, got "):
            call(jnp.array(kv_lens))


@pytest.mark.parametrize(("kv_lens", "fails"), [((0, 0), False), ((0, 1), True)])
def test_pages_without_room_hold_no_token(kv_lens, fails):
    pages = jnp.ones((5, 2, 0, 64))

    def call(kv_lens):
        return checked(PAGED | {"k_pages": pages, "v_pages": pages} | table_with(kv_lens=kv_lens))

    error, _ = jax.jit(checkify.checkify(call))(ints(*kv_lens))
    assert ("page_table.kv_lens: expected" in (error.get() or "")) == fails
    if fails:
        with pytest.raises(ValueError, match=r"^page_table\.kv_lens: expected "):
            call(ints(*kv_lens))
    else:
        call(ints(*kv_lens))


def test_unbatched_values():
    arguments = PAGED | {"q": PAGED["q"][0], "page_table": PageTable.from_block_tables([0, 9], 20)}
    with pytest.raises(ValueError, match=r"^page_table\.indices: expected "):
        checked(arguments)
