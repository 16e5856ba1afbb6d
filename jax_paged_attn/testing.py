"""Named problems, makers of their inputs, and tolerances; shared by tests and benchmarks.

Needs `chex` (the ``test`` extra). A problem marked ``interpret`` belongs to the subset that runs where a
kernel is interpreted, which costs seconds each; on its own platform an implementation runs every problem. A
problem marked ``newest`` also belongs to the subset that the newest release of JAX runs.
"""

import collections
import dataclasses
import re
import zlib
from types import ModuleType
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jax_paged_attn import dispatch, validation
from jax_paged_attn.page_table import PageTable


@dataclasses.dataclass(frozen=True)
class Case:
    """A named problem.

    Attributes
    ----------
    name : str
        Unique; also seeds the values.
    kv_lens : tuple[int, ...]
        Valid tokens of each row.
    num_q_heads, num_kv_heads, head_dim, page_size : int
        Shapes. With `contiguous`, `page_size` is ``max_kv_len``.
    v_head_dim : int or None
        None is `head_dim`.
    dtype, kv_layout : str
        Of the query and the cache.
    table : str
        "block_tables" or "csr".
    contiguous : bool
        A call of `decode_attention` rather than `paged_attention`.
    share_pages : bool
        Rows are prefixes of the longest row and share its pages.
    sm_scale : float or None
        None is the default.
    kv_starts : tuple[int, ...] or None
        None leaves it out.
    q_len : int or None
        Query tokens a row; None is one, without an axis of its own.
    q_lens : tuple[int, ...] or None
        Of each row in a call of `ragged_paged_attention`, which 3 of no row follow; None is another call.
    causal : bool
        As in `paged_attention`.
    soft_cap, window_left : float or int, or None
        None leaves them out.
    alibi, sinks : bool
        Whether there are slopes, and sinks.
    mask_len : int or None
        Keys that a random mask decides about; None leaves it out.
    cache_dtypes : tuple[str, str] or None
        Of quantized caches of keys and of values; None is `dtype`.
    scale : str or None
        What the scales of a quantized cache belong to: "tensor", "head" or "token".
    num_splits : int or None
        As in `paged_attention`.
    refused_by : tuple[str, ...]
        Implementations that say they can't run it.
    interpret, newest : bool
        The subsets that it belongs to.
    """

    name: str
    kv_lens: tuple[int, ...] = (0, 5, 64, 131)
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_layout: str = "HND"
    table: str = "block_tables"
    contiguous: bool = False
    share_pages: bool = False
    sm_scale: float | None = None
    kv_starts: tuple[int, ...] | None = None
    q_len: int | None = None
    q_lens: tuple[int, ...] | None = None
    causal: bool = True
    soft_cap: float | None = None
    window_left: int | None = None
    alibi: bool = False
    sinks: bool = False
    mask_len: int | None = None
    cache_dtypes: tuple[str, str] | None = None
    scale: str | None = None
    num_splits: int | None = None
    refused_by: tuple[str, ...] = ()
    interpret: bool = False
    newest: bool = False


def _boundaries(page_size: int, pages: int = 3) -> tuple[int, ...]:
    """List the lengths around a page's ends, and a full row."""
    return (0, 1, page_size - 1, page_size, page_size + 1, pages * page_size)


# What models use, and all of it at once.
_GEMMA2 = {"soft_cap": 5.0, "window_left": 40}
_ALL: dict[str, Any] = {**_GEMMA2, "alibi": True, "sinks": True}
_TOKENS_OF_NO_ROW = 3

_MANY_QUERIES = _LONG_MASKS = _RAGGED_MASKS = _RAGGED_WINDOWS_NOT_CAUSAL = ("mosaic_gpu",)
_ONLY_16_BIT = ("mosaic_gpu",)
_HEAD_DIMS_16_TO_256 = ("mosaic_gpu",)  # multiples of 8

_MIXED = ("mosaic_gpu",)  # a quantized cache of keys beside another of values, or the other way round
_E4M3 = ("float8_e4m3fn", "float8_e4m3fn")
_E5M2 = ("float8_e5m2", "float8_e5m2")
_INT8 = ("int8", "int8")

CASES = (
    Case("page_1", _boundaries(1, 70), page_size=1, interpret=True),
    Case("page_8", _boundaries(8, 10), page_size=8),
    Case("page_12", _boundaries(12, 7), page_size=12, interpret=True, newest=True),
    Case("page_16", _boundaries(16, 9), interpret=True, newest=True),
    Case("page_64", _boundaries(64), page_size=64),
    Case("page_100", _boundaries(100), page_size=100, interpret=True),
    Case("page_128", _boundaries(128), page_size=128),
    Case("page_544", _boundaries(544), page_size=544),
    Case("page_544_short", (0, 64, 545), page_size=544, interpret=True),
    Case("page_2048", _boundaries(2048, 2), page_size=2048),
    Case("page_2048_short", (3, 100, 2049), page_size=2048),
    Case("nhd", kv_layout="NHD", interpret=True, newest=True),
    Case("nhd_page_1", page_size=1, kv_layout="NHD"),
    Case("nhd_page_12", page_size=12, kv_layout="NHD", interpret=True),
    Case("nhd_page_128", page_size=128, kv_layout="NHD"),
    Case("nhd_head_dim_80", head_dim=80, kv_layout="NHD"),
    Case("hpnd", kv_layout="HPND", interpret=True, newest=True),
    Case("hpnd_page_8", page_size=8, kv_layout="HPND"),
    Case("hpnd_page_544", (0, 64, 545), page_size=544, kv_layout="HPND"),
    Case("float16", dtype="float16", interpret=True, newest=True),
    Case("float16_nhd", dtype="float16", kv_layout="NHD", head_dim=128),
    Case("float32", dtype="float32", refused_by=_ONLY_16_BIT, newest=True),
    Case("float32_hpnd", dtype="float32", kv_layout="HPND", refused_by=_ONLY_16_BIT),
    Case("float32_smollm2", (1, 15, 200), 9, 3, dtype="float32", refused_by=_ONLY_16_BIT),
    Case("group_1", num_q_heads=4, num_kv_heads=4, interpret=True),
    Case("group_3", num_q_heads=9, num_kv_heads=3, interpret=True, newest=True),
    Case("group_5", num_q_heads=10, num_kv_heads=2),
    Case("group_6", num_q_heads=24, num_kv_heads=4),
    Case("group_7", num_q_heads=28, num_kv_heads=4, interpret=True),
    Case("group_8", num_q_heads=16, num_kv_heads=2),
    Case("group_12", num_q_heads=12, num_kv_heads=1, interpret=True),
    Case("group_16", num_q_heads=64, num_kv_heads=4),
    Case("group_16_of_32", num_q_heads=32, num_kv_heads=2, interpret=True),
    Case("group_32", num_q_heads=32, num_kv_heads=1),
    Case("group_48", num_q_heads=48, num_kv_heads=1),
    Case("group_71", num_q_heads=71, num_kv_heads=1, interpret=True, newest=True),
    Case("group_17_nhd", (5, 0, 131), 34, 2, head_dim=128, kv_layout="NHD", interpret=True),
    Case("group_40_starts", (300, 64), 40, 1, head_dim=128, v_head_dim=64, kv_starts=(70, 0)),
    Case(
        "group_71_float16", (5, 200, 400), 71, 1, head_dim=128, dtype="float16", num_splits=3, interpret=True
    ),
    Case("group_64_head_dim_256", (3, 1000), 64, 1, head_dim=256, page_size=64),
    Case("group_24_page_12", (3, 130), 24, 1, head_dim=128, page_size=12),
    Case("group_32_head_dim_192", (3, 700, 0), 32, 1, head_dim=192, v_head_dim=128, page_size=544),
    Case("head_dim_16", head_dim=16, interpret=True),
    Case("head_dim_24", head_dim=24, interpret=True),
    Case("head_dim_56", head_dim=56),
    Case("head_dim_80", head_dim=80, interpret=True, newest=True),
    Case("head_dim_96", head_dim=96),
    Case("head_dim_112", head_dim=112),
    Case("head_dim_128", head_dim=128, interpret=True),
    Case("head_dim_192", head_dim=192),
    Case("head_dim_224", head_dim=224),
    Case("head_dim_256", head_dim=256, interpret=True),
    Case("head_dim_8", head_dim=8, refused_by=_HEAD_DIMS_16_TO_256),
    Case("head_dim_20", head_dim=20, refused_by=_HEAD_DIMS_16_TO_256, newest=True),
    Case("head_dim_7", head_dim=7, refused_by=_HEAD_DIMS_16_TO_256),
    Case("head_dim_320", head_dim=320, refused_by=_HEAD_DIMS_16_TO_256),
    Case("v_head_dim_7", v_head_dim=7, refused_by=_HEAD_DIMS_16_TO_256),
    Case("v_head_dim_16", v_head_dim=16),
    Case("v_head_dim_96", v_head_dim=96),
    Case("v_head_dim_128", (200, 3), head_dim=192, v_head_dim=128, interpret=True, newest=True),
    Case("v_head_dim_256", v_head_dim=256, kv_layout="NHD", interpret=True),
    Case("scale_zero", sm_scale=0.0),
    Case("scale_negative", sm_scale=-0.2, interpret=True),
    Case("scale_large", sm_scale=3.0),
    Case("starts", (0, 5, 64, 131), kv_starts=(0, 3, 16, 100), interpret=True, newest=True),
    Case("starts_empty", (1, 40, 64, 200), kv_starts=(1, 40, 63, 0), interpret=True),
    Case(
        "starts_nhd_page_128", (300, 130), page_size=128, kv_layout="NHD", kv_starts=(129, 1), interpret=True
    ),
    Case("starts_splits", (300, 0, 130, 7), kv_starts=(70, 0, 1, 6), num_splits=3, interpret=True),
    Case("splits_1", num_splits=1),
    Case("splits_2", (0, 1, 64, 200), num_splits=2, interpret=True, newest=True),
    Case("splits_8_short", (1, 2, 3), num_splits=8, interpret=True),
    Case("splits_5", (1500, 3, 640), num_splits=5),
    Case("csr", (5, 0, 33, 64), table="csr", interpret=True, newest=True),
    Case("csr_page_4", (0, 5), page_size=4, table="csr"),
    Case("csr_shared", (40, 33, 16, 0), table="csr", share_pages=True),
    Case("shared", (131, 100, 64, 1), share_pages=True),
    Case("contiguous", (1, 77, 0, 200), page_size=200, contiguous=True, interpret=True, newest=True),
    Case("contiguous_nhd", (1, 77, 0, 160), page_size=160, kv_layout="NHD", contiguous=True),
    Case("contiguous_roomy", (3, 130), page_size=16384, contiguous=True),
    Case("contiguous_starts", (50, 77), page_size=96, contiguous=True, kv_starts=(13, 77)),
    Case("all_empty", (0, 0, 0), interpret=True),
    Case("one_row", (77,)),
    Case("one_token", (1,), interpret=True),
    Case("one_long_row", (2000, 3, 20, 0, 7), num_q_heads=4, interpret=True),
    Case("many_rows", tuple(range(0, 160, 4)), num_q_heads=2, num_kv_heads=1, interpret=True),
    Case("many_rows_starts", (64,) * 40, 2, 1, kv_starts=tuple(range(0, 80, 2))),
    Case("many_short_rows", tuple(range(300)), num_q_heads=4, num_kv_heads=1),
    Case("e4m3", cache_dtypes=_E4M3),
    Case("e4m3_tensor", cache_dtypes=_E4M3, scale="tensor", head_dim=128, interpret=True, newest=True),
    Case("e4m3_head_float32", dtype="float32", cache_dtypes=_E4M3, scale="head", refused_by=_ONLY_16_BIT),
    Case("e4m3_token", cache_dtypes=_E4M3, scale="token", interpret=True, newest=True),
    Case(
        "e4m3_token_page_12", cache_dtypes=_E4M3, scale="token", page_size=12, kv_layout="NHD", interpret=True
    ),
    Case("int8_token_page_100", (0, 101, 350), cache_dtypes=_INT8, scale="token", page_size=100),
    Case("e4m3_page_12", cache_dtypes=_E4M3, scale="head", page_size=12, head_dim=80),
    Case("e4m3_page_1_nhd", cache_dtypes=_E4M3, page_size=1, kv_layout="NHD", head_dim=48, interpret=True),
    Case("e4m3_page_544", (0, 64, 545), page_size=544, cache_dtypes=_E4M3),
    Case("e4m3_group_71", (5, 200), 71, 1, cache_dtypes=_E4M3, scale="head", interpret=True),
    Case("e4m3_head_dim_256", (3, 130), cache_dtypes=_E4M3, head_dim=256, interpret=True),
    Case("e4m3_head_dim_24", cache_dtypes=_E4M3, head_dim=24, refused_by=_HEAD_DIMS_16_TO_256),
    Case("e5m2_nhd", cache_dtypes=_E5M2, scale="token", kv_layout="NHD", interpret=True),
    Case("e5m2_float16", dtype="float16", cache_dtypes=_E5M2, scale="tensor", head_dim=192),
    Case("e5m2_starts", (64, 131), cache_dtypes=_E5M2, v_head_dim=112, kv_starts=(16, 100), interpret=True),
    Case("int8_head", cache_dtypes=_INT8, scale="head", num_splits=3, interpret=True),
    Case(
        "int8_hpnd",
        cache_dtypes=_INT8,
        scale="token",
        kv_layout="HPND",
        interpret=True,
        newest=True,
    ),
    Case("int8_float16", dtype="float16", cache_dtypes=_INT8, scale="token"),
    Case("k_e4m3_v_int8", cache_dtypes=("float8_e4m3fn", "int8"), scale="head", interpret=True),
    Case("k_int8_v_bfloat16", cache_dtypes=("int8", "bfloat16"), refused_by=_MIXED),
    Case(
        "e4m3_contiguous",
        (1, 77, 0, 200),
        page_size=200,
        contiguous=True,
        cache_dtypes=_E4M3,
        scale="token",
    ),
    Case(
        "e4m3_contiguous_head",
        (1, 77, 0, 200),
        page_size=200,
        contiguous=True,
        cache_dtypes=_E4M3,
        scale="head",
    ),
    Case("e4m3_many_rows", tuple(range(300)), 4, 1, cache_dtypes=_E4M3, scale="head"),
    Case("e4m3_long", (4092, 4096, 192, 8191), 32, 8, head_dim=128, cache_dtypes=_E4M3, scale="head"),
    Case("cap", soft_cap=2.0),
    Case("cap_large_scores", soft_cap=30.0, sm_scale=400.0),
    Case("window", (0, 5, 64, 131, 300), window_left=20, newest=True),
    Case("window_0_page_12", (0, 1, 12, 77), window_left=0, page_size=12),
    Case("window_wide", (5, 300), window_left=2**31 - 1),
    Case(
        "window_starts_splits",
        (300, 0, 130, 7),
        kv_starts=(250, 0, 1, 6),
        window_left=77,
        num_splits=3,
        interpret=True,
    ),
    Case("window_many_rows", tuple(range(0, 320, 8)), 4, 1, window_left=63),
    Case(
        "window_page_544_nhd",
        (64, 545, 700),
        window_left=100,
        page_size=544,
        kv_layout="NHD",
    ),
    Case(
        "window_contiguous",
        (1, 77, 0, 200),
        page_size=200,
        contiguous=True,
        window_left=30,
    ),
    Case("alibi_group_3", (0, 5, 131), 9, 3, alibi=True),
    Case("sinks", sinks=True),
    Case("sinks_splits_5", (700, 3, 0), 8, 1, sinks=True, num_splits=5, kv_layout="HPND", interpret=True),
    Case("sinks_e4m3_token", cache_dtypes=_E4M3, scale="token", sinks=True),
    Case("all", **_ALL, newest=True),
    Case(
        "all_float16_starts_splits",
        (300, 0, 131),
        **_ALL,
        dtype="float16",
        kv_starts=(280, 0, 50),
        num_splits=2,
        interpret=True,
    ),
    Case("all_group_71", (5, 200), 71, 1, **_ALL, interpret=True),
    Case("all_int8_head", cache_dtypes=_INT8, scale="head", head_dim=80, **_ALL, interpret=True),
    Case(
        "all_e4m3_token_nhd",
        cache_dtypes=_E4M3,
        scale="token",
        kv_layout="NHD",
        **_ALL,
        interpret=True,
    ),
    Case("queries_4", q_len=4, interpret=True, newest=True),
    Case("queries_1_axis", q_len=1),
    Case("queries_4_short", (2, 0, 4, 5), q_len=4, interpret=True),
    Case("queries_3_all_group_3", (300, 2, 0), 9, 3, q_len=3, **_ALL),
    Case("queries_4_not_causal", q_len=4, causal=False, window_left=9, interpret=True),
    Case("queries_5_tree", (0, 3, 70, 131), q_len=5, mask_len=5, newest=True),
    Case(
        "queries_5_tree_all_starts",
        (130, 3, 300),
        q_len=5,
        mask_len=12,
        **_ALL,
        kv_starts=(125, 0, 7),
        interpret=True,
    ),
    Case(
        "queries_tree_not_causal",
        (0, 70, 131),
        q_len=3,
        mask_len=7,
        causal=False,
        num_splits=2,
    ),
    Case("mask_of_one_query", (0, 3, 70, 131), mask_len=9, window_left=20, interpret=True),
    Case(
        "queries_4_e4m3_token",
        q_len=4,
        cache_dtypes=_E4M3,
        scale="token",
        sinks=True,
        interpret=True,
    ),
    Case(
        "queries_4_int8_hpnd",
        q_len=4,
        cache_dtypes=_INT8,
        scale="head",
        kv_layout="HPND",
        **_ALL,
    ),
    Case(
        "queries_7_contiguous_nhd",
        (1, 77, 0, 160),
        page_size=160,
        kv_layout="NHD",
        contiguous=True,
        q_len=7,
        window_left=30,
    ),
    Case("queries_100", (100, 64, 300), q_len=100, head_dim=128, v_head_dim=96),
    Case("queries_33_group_71", (100, 7), 71, 1, q_len=33, sinks=True, refused_by=_MANY_QUERIES),
    Case(
        "queries_20_tree_two_words",
        (100, 10),
        q_len=20,
        mask_len=40,
        window_left=50,
        head_dim=128,
        interpret=True,
    ),
    Case("mask_of_200", (131, 250), q_len=3, mask_len=200, refused_by=_LONG_MASKS),
    Case(
        "queries_4_float32_csr",
        (5, 0, 33, 64),
        q_len=4,
        dtype="float32",
        table="csr",
        **_ALL,
        refused_by=_ONLY_16_BIT,
    ),
    Case("ragged", (0, 5, 64, 131, 300), q_lens=(1, 0, 1, 37, 100), newest=True),
    Case("ragged_short", q_lens=(2, 1, 9, 3), interpret=True, newest=True),
    Case("ragged_one_query_a_row", (7, 0, 131), q_lens=(1, 1, 1), v_head_dim=96),
    Case("ragged_more_queries_than_keys", (2, 0, 40), 9, 3, q_lens=(5, 3, 41), interpret=True),
    Case(
        "ragged_all_starts_splits",
        (300, 0, 131, 12),
        q_lens=(3, 2, 20, 12),
        page_size=12,
        **_ALL,
        kv_starts=(150, 0, 50, 1),
        num_splits=3,
        interpret=True,
    ),
    Case(
        "ragged_tree",
        (3, 70, 131, 9),
        q_lens=(5, 1, 6, 0),
        mask_len=6,
        window_left=9,
        refused_by=_RAGGED_MASKS,
    ),
    Case(
        "ragged_not_causal_e4m3_token",
        (70, 131, 3),
        q_lens=(20, 3, 1),
        kv_layout="NHD",
        cache_dtypes=_E4M3,
        scale="token",
        causal=False,
        window_left=9,
        refused_by=_RAGGED_WINDOWS_NOT_CAUSAL,
    ),
    Case("ragged_int8_head", q_lens=(0, 9, 2, 70), cache_dtypes=_INT8, scale="head", **_ALL),
    Case(
        "ragged_float32_hpnd_csr",
        (5, 0, 33, 64),
        q_lens=(5, 0, 1, 40),
        dtype="float32",
        kv_layout="HPND",
        table="csr",
        refused_by=_ONLY_16_BIT,
    ),
    Case("long", (4092, 4096, 192, 8191), num_kv_heads=8, num_q_heads=32, head_dim=128),
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of a public function.

    Attributes
    ----------
    function : str
        Its name, in `jax_paged_attn` and in `jax_paged_attn.reference`.
    args : tuple
        Positional arguments.
    options : dict
        Keyword arguments that its reference takes too.
    tuning : dict
        Keyword arguments that its reference doesn't take.
    """

    function: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    tuning: dict[str, Any]

    def call(self, module: ModuleType, **options: Any) -> tuple[jax.Array, jax.Array]:
        """Call the function of `module` (`jax_paged_attn`) for (out, lse)."""
        call = getattr(module, self.function)
        return call(*self.args, return_lse=True, **self.options, **self.tuning, **options)

    def expected(self) -> tuple[jax.Array, jax.Array]:
        """Call the reference for float32 (out, lse)."""
        from jax_paged_attn import reference

        call = getattr(reference, self.function)
        return jax.jit(lambda args: call(*args, return_lse=True, **self.options))(self.args)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far a result may lie from the float32 reference.

    Attributes
    ----------
    out_atol : float
        Of the output, in units of the root mean square of the expected vector: errors of the weights scale
        with it, and a mean of many values is small.
    out_rtol : float
        Of the output, relative: the last rounding.
    lse_atol : float
        Of the log-sum-exp, which is float32 for every dtype.
    """

    out_atol: float
    out_rtol: float
    lse_atol: float


# By the output's dtype. In 16 bits: one rounding of the output (eps / 2), and weights rounded before P V.
TOLERANCES = {
    "bfloat16": Tolerance(2.0**-7, 2.0**-8, 2e-5),
    "float16": Tolerance(2.0**-10, 2.0**-11, 2e-5),
    "float32": Tolerance(4e-6, 1e-6, 5e-6),
}


def interpreting(implementation: str) -> bool:
    """Whether the default device would interpret this implementation rather than run it."""
    (named,) = (candidate for candidate in dispatch.IMPLEMENTATIONS if candidate.name == implementation)
    return dispatch.Target.current().platform in named.interpreted_on


def runs() -> list[tuple[str, Case]]:
    """List each (implementation, problem) for the default device: all, or the subset where it interprets."""
    return [
        (candidate.name, case)
        for candidate in dispatch.IMPLEMENTATIONS
        for case in CASES
        if case.interpret or candidate.name in case.refused_by or not interpreting(candidate.name)
    ]


def case(name: str) -> Case:
    """Look up a problem by name."""
    (found,) = (candidate for candidate in CASES if candidate.name == name)
    return found


def make_inputs(case: Case, *, poison: float = np.nan, spare_pages: int = 3) -> Inputs:
    """Make a problem's inputs: normal values, pages in random order.

    Parameters
    ----------
    case : Case
        The problem.
    poison : float
        Fills every slot and page of the cache that no query sees.
    spare_pages : int
        Pages that no row points to. Unused table entries, of which there are some, hold -1 and 2**31 - 1, and
        so do those of pages before the first key that a query sees.

    Returns
    -------
    Inputs
        The same values for every `poison`.
    """
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    dtype = jnp.dtype(case.dtype)
    dims = {"k": case.head_dim, "v": case.v_head_dim or case.head_dim}
    page_size, heads = case.page_size, case.num_kv_heads
    rows = len(case.kv_lens)
    q_lens = case.q_lens or (case.q_len or 1,) * rows
    lead = (rows,) if case.q_len is None else (rows, case.q_len)
    if case.q_lens is not None:
        lead = (sum(q_lens) + _TOKENS_OF_NO_ROW,)
    q = rng.standard_normal((*lead, case.num_q_heads, case.head_dim)).astype(dtype)
    tables, num_pages = _assign_pages(case, rng, spare_pages)
    mask, masks = None, [None] * rows
    if case.mask_len is not None:
        mask = rng.random((*lead, case.mask_len)) < 0.6
        masks = np.split(mask.reshape(-1, case.mask_len), np.cumsum(q_lens))
    seen = [_seen(case, row, q_lens[row], masks[row]) for row in range(rows)]
    order = validation.LAYOUT_AXES["NHD"]
    order = tuple(order.index(axis) for axis in validation.LAYOUT_AXES[case.kv_layout])
    caches = {}
    options: dict[str, Any] = {"kv_layout": case.kv_layout, "sm_scale": case.sm_scale}
    for name, cache_dtype in zip(dims, case.cache_dtypes or (case.dtype,) * 2, strict=True):
        head_dim, cache_dtype = dims[name], jnp.dtype(cache_dtype)
        integers = cache_dtype == np.int8  # which have no NaN, and need a scale to be of use
        bad = (0 if poison == 0 else 127) if integers else poison
        pages = np.full((num_pages, page_size, heads, head_dim), bad, cache_dtype)
        scales = np.full((num_pages, page_size, heads), poison, np.float32)
        for table, kv_len, of_row in zip(tables, case.kv_lens, seen, strict=True):
            # A contiguous row's page may be far longer than its tokens.
            tokens = rng.standard_normal((kv_len, heads, head_dim)) * (30 if integers else 1)
            tokens = (np.clip(np.rint(tokens), -128, 127) if integers else tokens).astype(cache_dtype)
            for entry, page in enumerate(table):
                in_page = slice(entry * page_size, (entry + 1) * page_size)
                of_page, is_seen = tokens[in_page], of_row[in_page]
                pages[page, : len(of_page)][is_seen] = of_page[is_seen]
                sizes = rng.lognormal(sigma=0.5, size=(len(of_page), heads))
                scales[page, : len(of_page)][is_seen] = sizes[is_seen] / (30 if integers else 1)
        caches[name] = jnp.asarray(np.ascontiguousarray(pages.transpose(order)))
        if case.scale == "token":
            options[f"{name}_scale"] = jnp.asarray(np.ascontiguousarray(scales.transpose(order[:-1])))
        elif case.scale is not None:
            scale = rng.uniform(0.5, 2, heads if case.scale == "head" else ()) / (30 if integers else 1)
            options[f"{name}_scale"] = jnp.asarray(scale, jnp.float32)
    if case.kv_starts is not None:
        options["kv_starts"] = jnp.asarray(case.kv_starts, jnp.int32)
    options |= {
        name: value for name in ("soft_cap", "window_left") if (value := getattr(case, name)) is not None
    }
    if case.alibi:
        options["alibi_slopes"] = jnp.asarray(rng.uniform(0, 0.2, case.num_q_heads), jnp.float32)
    if case.sinks:
        options["sinks"] = jnp.asarray(rng.normal(1, 2, case.num_q_heads), jnp.float32)
    if mask is not None:
        options["mask"] = jnp.asarray(mask)
    if not case.causal:
        options["causal"] = False
    tuning = {"num_splits": case.num_splits}
    if case.contiguous:
        args = (jnp.asarray(q), caches["k"], caches["v"], jnp.asarray(case.kv_lens, jnp.int32))
        return Inputs("decode_attention", args, options, tuning)
    for table, of_row in zip(tables, seen, strict=True):
        hidden = (int(np.argmax(of_row)) if of_row.any() else of_row.size) // page_size
        table[:hidden] = _unused_entries(hidden)
    args = (jnp.asarray(q), caches["k"], caches["v"], _page_table(case, tables))
    if case.q_lens is not None:
        q_indptr = jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32)
        return Inputs("ragged_paged_attention", (*args, q_indptr), options, tuning)
    return Inputs("paged_attention", args, options, tuning)


def _seen(case: Case, row: int, q_len: int, mask: np.ndarray | None) -> np.ndarray:
    """Which keys of a row some query sees, bool[kv_len]."""
    kv_len = case.kv_lens[row]
    key, query = np.arange(kv_len), kv_len - q_len + np.arange(q_len)[:, None]
    visible = (key <= query) | (not case.causal)
    if case.window_left is not None:
        visible &= key >= query - case.window_left
    if mask is not None:
        decided = min(kv_len, mask.shape[1])
        visible[:, kv_len - decided :] = mask[:, mask.shape[1] - decided :]
    return visible.any(axis=0) & (key >= (case.kv_starts[row] if case.kv_starts else 0))


def assert_close(actual: Any, expected: Any) -> None:
    """Compare a result with the float32 reference's by the tolerance of its dtype.

    Parameters
    ----------
    actual, expected : array, or (out, lse)
        `expected` in float32.

    Raises
    ------
    AssertionError
        If they differ by more.
    """
    out, lse = actual if isinstance(actual, tuple) else (actual, None)
    expected_out, expected_lse = expected if isinstance(expected, tuple) else (expected, None)
    tolerance = TOLERANCES[out.dtype.name]
    expected_out = np.asarray(expected_out)
    chex.assert_shape(out, expected_out.shape)
    rms = np.sqrt(np.mean(np.square(expected_out), axis=-1, keepdims=True))
    rms = np.where(rms > 0, rms, np.float32(1))
    scaled = np.asarray(out).astype(np.float32) / rms
    chex.assert_trees_all_close(scaled, expected_out / rms, atol=tolerance.out_atol, rtol=tolerance.out_rtol)
    if lse is not None or expected_lse is not None:
        chex.assert_type(lse, jnp.float32)
        chex.assert_trees_all_close(
            np.asarray(lse), np.asarray(expected_lse), atol=tolerance.lse_atol, rtol=1e-6
        )


def collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Count the exchanges between devices that a compiled call takes, such as {"all-to-all": 1}."""
    text = compiled.as_text()
    assert text, "no HLO to look at"
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter"
    return dict(collections.Counter(re.findall(rf" ({kinds})(?:-start)?\(", text)))


def _assign_pages(case: Case, rng: np.random.Generator, spare_pages: int) -> tuple[list[np.ndarray], int]:
    """Choose the page ids that each row uses; returns them and the size of the pool."""
    if case.contiguous:
        return [np.array([row]) for row in range(len(case.kv_lens))], len(case.kv_lens)
    counts = [-(-kv_len // case.page_size) for kv_len in case.kv_lens]
    used = max(counts) if case.share_pages else sum(counts)
    ids = rng.permutation(used + spare_pages).astype(np.int32)
    if case.share_pages:
        return [ids[:count] for count in counts], ids.size
    return np.split(ids, np.cumsum(counts))[:-1], ids.size


def _page_table(case: Case, tables: list[np.ndarray]) -> PageTable:
    if case.table == "csr":
        indptr = np.cumsum([0, *(len(table) for table in tables)])
        full_pages = np.array([max(len(table) - 1, 0) for table in tables])
        last_page_len = np.array(case.kv_lens) - full_pages * case.page_size
        indices = np.concatenate([*tables, _unused_entries(4)])
        return PageTable.from_csr(indptr, indices, last_page_len, page_size=case.page_size)
    width = max(len(table) for table in tables) + 2
    rows = [np.concatenate([table, _unused_entries(width - len(table))]) for table in tables]
    return PageTable.from_block_tables(np.stack(rows), np.array(case.kv_lens))


def _unused_entries(count: int) -> np.ndarray:
    return np.resize(np.array([-1, 2**31 - 1], np.int32), count)
