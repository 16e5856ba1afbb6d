"""Named problems of cache writes, makers of their inputs, and their comparison with the reference."""

import dataclasses
import zlib
from types import ModuleType
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jax_paged_attn import dispatch, rope, validation


@dataclasses.dataclass(frozen=True)
class AppendCase:
    """A named problem.

    Attributes
    ----------
    name : str
        Unique; also seeds the values.
    num_tokens, num_kv_heads, head_dim, page_size, num_pages : int
        Shapes.
    v_head_dim : int or None
        None is `head_dim`.
    dtype : str
        Of the new tokens.
    pool_dtypes : tuple[str, str] or None
        Of the pools of keys and of values; None is `dtype`.
    kv_layout : str
        Of the pools.
    slots : str
        "distinct" slots in random order, "repeated" (drawn with replacement from few, some to be skipped),
        "runs" (pages filled in order), or "none" (all to be skipped).
    scale : str or None
        What the scales belong to: "tensor", "head" or "token".
    num_q_heads : int or None
        With it, q and k are rotated.
    rotary_dim : int or None
        None is `head_dim`.
    interleaved, table : bool
        How pairs lie; whether cosines and sines come from a table, which some positions miss.
    refused_by : tuple[str, ...]
        Implementations that say they can't run it.
    newest : bool
        Whether the newest release of jax runs it.
    """

    name: str
    num_tokens: int = 21
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    num_pages: int = 12
    v_head_dim: int | None = None
    dtype: str = "bfloat16"
    pool_dtypes: tuple[str, str] | None = None
    kv_layout: str = "HND"
    slots: str = "repeated"
    scale: str | None = None
    num_q_heads: int | None = None
    rotary_dim: int | None = None
    interleaved: bool = False
    table: bool = False
    refused_by: tuple[str, ...] = ()
    newest: bool = False

    @property
    def function(self) -> str:
        """The public function that it calls."""
        return "append_paged_kv" if self.num_q_heads is None else "rope_append_paged_kv"


_E4M3 = ("float8_e4m3fn", "float8_e4m3fn")
_E5M2 = ("float8_e5m2", "float8_e5m2")
_INT8 = ("int8", "int8")
_KERNEL = ("mosaic_gpu",)

APPEND_CASES = (
    AppendCase("one_token", 1, slots="distinct", newest=True),
    AppendCase("two_of_a_slot", 2, num_pages=1, page_size=1),
    AppendCase("repeated", 70, newest=True),
    AppendCase("repeated_many", 300, num_pages=4, num_kv_heads=1),
    AppendCase("runs", 64, slots="runs"),
    AppendCase("none", slots="none"),
    AppendCase("page_1", page_size=1, num_pages=40),
    AppendCase("page_12", page_size=12),
    AppendCase("page_544", page_size=544, num_pages=2),
    AppendCase("nhd", kv_layout="NHD", newest=True),
    AppendCase("hpnd", kv_layout="HPND", newest=True),
    AppendCase("heads_1", num_kv_heads=1, head_dim=24),
    AppendCase("heads_3", num_kv_heads=3, head_dim=80, kv_layout="NHD"),
    AppendCase("heads_8", num_kv_heads=8, head_dim=128),
    AppendCase("v_head_dim", head_dim=192, v_head_dim=128),
    AppendCase("float16", dtype="float16"),
    AppendCase("float32", dtype="float32", head_dim=24),
    AppendCase("head_dim_20", head_dim=20, refused_by=_KERNEL),
    AppendCase("e4m3", pool_dtypes=_E4M3, newest=True),
    AppendCase("e4m3_tensor", pool_dtypes=_E4M3, scale="tensor"),
    AppendCase("e4m3_head", pool_dtypes=_E4M3, scale="head", num_kv_heads=3, kv_layout="NHD"),
    AppendCase("e4m3_token", pool_dtypes=_E4M3, scale="token", num_kv_heads=3, newest=True),
    AppendCase("e5m2_tensor", pool_dtypes=_E5M2, scale="tensor", dtype="float16"),
    AppendCase("e5m2_hpnd", pool_dtypes=_E5M2, scale="token", kv_layout="HPND"),
    AppendCase("int8_tensor", pool_dtypes=_INT8, scale="tensor", dtype="float32"),
    AppendCase("int8_token_nhd", pool_dtypes=_INT8, scale="token", kv_layout="NHD", num_kv_heads=5),
    AppendCase("mixed", pool_dtypes=("float8_e4m3fn", "int8"), scale="head", newest=True),
    AppendCase("k_only", pool_dtypes=("float8_e4m3fn", "bfloat16")),
    AppendCase("e4m3_head_dim_24", pool_dtypes=_E4M3, head_dim=24, refused_by=_KERNEL),
    AppendCase("rope", num_q_heads=6, newest=True),
    AppendCase("rope_heads_9_3", num_q_heads=9, num_kv_heads=3),
    AppendCase("rope_head_dim_96", num_q_heads=4, head_dim=96, kv_layout="NHD"),
    AppendCase("rope_head_dim_128", 9, num_q_heads=32, num_kv_heads=8, head_dim=128),
    AppendCase("rope_partial", num_q_heads=4, head_dim=128, rotary_dim=64, newest=True),
    AppendCase("rope_table", num_q_heads=4, table=True),
    AppendCase("rope_float16", num_q_heads=4, dtype="float16", kv_layout="HPND"),
    AppendCase("rope_float32", num_q_heads=4, dtype="float32", head_dim=128),
    AppendCase("rope_e4m3", num_q_heads=4, head_dim=128, pool_dtypes=_E4M3, scale="tensor", newest=True),
    AppendCase(
        "rope_e4m3_partial", num_q_heads=4, head_dim=96, rotary_dim=32, pool_dtypes=_E4M3, scale="token"
    ),
    AppendCase("rope_int8_table", num_q_heads=4, table=True, pool_dtypes=_INT8, scale="head"),
    AppendCase("rope_pairs", num_q_heads=4, interleaved=True, refused_by=_KERNEL),
    AppendCase(
        "rope_pairs_partial",
        9,
        head_dim=80,
        num_q_heads=4,
        rotary_dim=32,
        interleaved=True,
        refused_by=_KERNEL,
    ),
    AppendCase("rope_head_dim_80_float32", num_q_heads=4, head_dim=80, dtype="float32", refused_by=_KERNEL),
)


# Sines and cosines differ by a few units in the last place, and differences of products cancel.
ROTATION_ATOL = 1e-5


@dataclasses.dataclass(frozen=True)
class AppendInputs:
    """Arguments of a public function, and where its pools are written."""

    case: AppendCase
    args: tuple[Any, ...]
    options: dict[str, Any]
    written: np.ndarray  # bool [num_slots]

    def call(self, module: ModuleType, **options: Any) -> tuple[jax.Array, ...]:
        """Call the function of `module`, in one compilation."""
        function = getattr(module, self.case.function)
        return jax.jit(lambda args, arrays: function(*args, **arrays, **self._static, **options))(
            self.args, self._arrays
        )

    @property
    def _static(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if not hasattr(value, "shape")}

    @property
    def _arrays(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if hasattr(value, "shape")}


def append_case(name: str) -> AppendCase:
    """Look up a problem by name."""
    (found,) = (candidate for candidate in APPEND_CASES if candidate.name == name)
    return found


def append_runs() -> list[tuple[str, AppendCase]]:
    """List each (implementation, problem)."""
    return [(candidate.name, case) for candidate in dispatch.IMPLEMENTATIONS for case in APPEND_CASES]


def make_append_inputs(case: AppendCase) -> AppendInputs:
    """Make a problem's inputs: normal values and a few extreme ones, pools full of random bits."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    sizes = {"num_pages": case.num_pages, "num_kv_heads": case.num_kv_heads, "page_size": case.page_size}
    lead = [sizes[axis] for axis in validation.LAYOUT_AXES[case.kv_layout][:3]]
    dims = (case.head_dim, case.v_head_dim or case.head_dim)
    pools, news = [], []
    for head_dim, pool_dtype in zip(dims, case.pool_dtypes or (case.dtype, case.dtype), strict=True):
        dtype = jnp.dtype(pool_dtype)
        bits = rng.integers(0, 256, (*lead, head_dim * dtype.itemsize), np.uint8)  # NaN among them
        if pool_dtype == "float8_e5m2":  # XLA on the CPU keeps that it is NaN, but not which one
            bits = np.where((bits & 0x7F) > 0x7C, np.uint8(0x7F), bits)
        pools.append(jnp.asarray(bits.view(dtype)))
        values = rng.standard_normal((case.num_tokens, case.num_kv_heads, head_dim)) * 3
        if case.num_q_heads is None:  # a rotation would mix them with its other values
            extreme = rng.random(values.shape)
            values = np.where(extreme < 0.02, values * 1000, values)
            special = rng.choice([0.0, -0.0, np.nan, np.inf, -np.inf], values.shape)
            values = np.where(extreme > 0.99, special, values)
        news.append(jnp.asarray(values.astype(np.float32)).astype(case.dtype))
    num_slots, tokens = case.num_pages * case.page_size, case.num_tokens
    slots = {
        "distinct": lambda: rng.permutation(num_slots)[:tokens],
        "repeated": lambda: rng.choice(
            [-1, -(2**31), num_slots, 2**31 - 1, *range(num_slots)], case.num_tokens
        ),
        "runs": lambda: np.concatenate([np.arange(16) + 16 * page for page in rng.permutation(12)])[
            : case.num_tokens
        ],
        "none": lambda: np.full(tokens, -1),
    }[case.slots]()
    if case.slots == "repeated":  # to be sure of some
        slots[-1] = slots[0] = num_slots // 2
    written = np.zeros(num_slots, bool)
    written[slots[(slots >= 0) & (slots < num_slots)]] = True
    options: dict[str, Any] = {"kv_layout": case.kv_layout}
    scale_shape = {"tensor": (), "head": (case.num_kv_heads,), "token": (case.num_tokens, case.num_kv_heads)}
    if case.scale is not None:
        for name in ("k", "v"):
            scale = rng.uniform(0.01, 0.5, scale_shape[case.scale]).astype(np.float32)
            options[f"{name}_scale"] = jnp.asarray(scale)
            if case.scale == "token":
                bits = rng.integers(0, 256, (*lead, 4), np.uint8)
                options[f"{name}_scale_pages"] = jnp.asarray(bits.view(np.float32)[..., 0])
    slots = jnp.asarray(slots, jnp.int32)
    if case.num_q_heads is None:
        return AppendInputs(case, (*pools, *news, slots), options, written)
    q = rng.standard_normal((case.num_tokens, case.num_q_heads, case.head_dim)).astype(np.float32)
    positions = rng.integers(0, 5000, case.num_tokens).astype(np.int32)
    inv_freq = rope.rope_frequencies(case.rotary_dim or case.head_dim)
    options["interleaved"] = case.interleaved
    if case.table:
        options["cos_sin"] = rope.rope_cos_sin(inv_freq, 4000)
        positions[:2] = (-1, 4000)
    else:
        options["inv_freq"] = inv_freq
    args = (jnp.asarray(q).astype(case.dtype), *news, jnp.asarray(positions), *pools, slots)
    return AppendInputs(case, args, options, written)


def assert_appended(inputs: AppendInputs, actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Compare results with the reference's.

    What isn't rotated is the same to the bit; rotated values lie within the rounding of their dtype.

    Raises
    ------
    AssertionError
        If they differ by more.
    """
    case = inputs.case
    assert len(actual) == len(expected)
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(actual, expected, strict=True)]
    if case.num_q_heads is not None:
        q, expected_q = pairs.pop(0)
        chex.assert_type(q, case.dtype)
        _assert_rounded(q, expected_q)
        k_pages, expected_k_pages = pairs.pop(0)
        mask = slot_mask(inputs, k_pages)
        assert _same_bits(k_pages, expected_k_pages)[~mask].all(), "a slot that no token has was written"
        _assert_rounded(k_pages[mask], expected_k_pages[mask])
    for pool, expected_pool in pairs:
        same = _same_bits(pool, expected_pool)
        # Which NaN a conversion makes is left open where tokens were written.
        both_nan = np.isnan(pool.astype(np.float32)) & np.isnan(expected_pool.astype(np.float32))
        same |= both_nan & slot_mask(inputs, pool)
        assert same.all(), f"{np.sum(~same)} of {same.size} values differ"


def slot_mask(inputs: AppendInputs, pool: np.ndarray) -> np.ndarray:
    """Say of each value of a pool whether its slot is written."""
    axes = validation.LAYOUT_AXES[inputs.case.kv_layout]
    written = inputs.written.reshape(inputs.case.num_pages, inputs.case.page_size)
    written = np.expand_dims(written, axes.index("num_kv_heads"))
    return np.broadcast_to(written if pool.ndim == 3 else written[..., None], pool.shape)


def _same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    chex.assert_type(a, b.dtype)
    unsigned = f"u{a.dtype.itemsize}"
    return np.ascontiguousarray(a).view(unsigned) == np.ascontiguousarray(b).view(unsigned)


def rotation_tolerance(dtype: Any) -> tuple[float, float]:
    """Say how far rotated values of `dtype` may be off: (absolute, relative), which add up."""
    if dtype == np.int8:
        return 1.0, 0.0
    info = jnp.finfo(dtype)
    return max(float(info.smallest_subnormal), ROTATION_ATOL), float(info.eps)


def _assert_rounded(values: np.ndarray, expected: np.ndarray) -> None:
    """Compare rotated values with expected ones, in float32 or rounded themselves."""
    atol, rtol = rotation_tolerance(values.dtype)
    values, expected = values.astype(np.float32), expected.astype(np.float32)
    chex.assert_trees_all_close(values, expected, atol=atol, rtol=rtol)
