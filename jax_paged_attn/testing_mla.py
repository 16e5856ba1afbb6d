"""Named problems of latent attention and makers of their inputs; tolerances are those of `testing`."""

import dataclasses
import zlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged_attn import dispatch
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.testing import interpreting


@dataclasses.dataclass(frozen=True)
class MlaCase:
    """A named problem.

    Attributes
    ----------
    name : str
        Unique; also seeds the values.
    kv_lens : tuple[int, ...]
        Valid tokens of each row.
    num_heads, rank, rope_dim, page_size : int
        Shapes.
    q_len : int or None
        None is the form of one token without an axis.
    dtype : str
        Of the query.
    cache_dtypes : tuple[str, str] or None
        Of cached latents and rotated keys; None is `dtype`.
    paired : bool
        Whether these lie in two pools.
    scale : str or None
        What the scales of a quantized cache belong to: "tensor" or "token".
    causal : bool
        As in `mla_decode`.
    num_splits : int or None
        As in `mla_decode`.
    refused_by : tuple[str, ...]
        Implementations that say they can't run it.
    interpret, newest : bool
        The subsets that it belongs to, as in `testing`.
    """

    name: str
    kv_lens: tuple[int, ...] = (0, 5, 64, 131)
    num_heads: int = 16
    rank: int = 128
    rope_dim: int = 64
    page_size: int = 16
    q_len: int | None = None
    dtype: str = "bfloat16"
    cache_dtypes: tuple[str, str] | None = None
    paired: bool = False
    scale: str | None = None
    causal: bool = True
    num_splits: int | None = None
    refused_by: tuple[str, ...] = ()
    interpret: bool = False
    newest: bool = False


_E4M3 = ("float8_e4m3fn", "float8_e4m3fn")
_INT8 = ("int8", "int8")
_LATENTS = ("float8_e4m3fn", "bfloat16")
_KERNEL = ("mosaic_gpu",)

MLA_CASES = (
    MlaCase("plain", newest=True, interpret=True),
    MlaCase("deepseek", (1, 4096, 777), 128, 512, page_size=64),
    MlaCase("deepseek_short", (70, 0, 9), 64, 512, page_size=64, interpret=True),
    MlaCase("mistral", (300, 7), 32, 256),
    MlaCase("narrow_rope", (300, 7), 32, 256, 32, page_size=64, interpret=True),
    MlaCase("heads_1", num_heads=1),
    MlaCase("heads_5", num_heads=5, page_size=8, refused_by=_KERNEL),
    MlaCase("heads_71", num_heads=71, newest=True, interpret=True),
    MlaCase("heads_128", (3, 200), num_heads=128),
    MlaCase("rank_96_rope_24", rank=96, rope_dim=24, refused_by=_KERNEL),
    MlaCase("rank_384", (100, 3), rank=384, page_size=64),
    MlaCase("page_1", (0, 1, 70), page_size=1, refused_by=_KERNEL),
    MlaCase("page_12", (0, 12, 13, 84), page_size=12, refused_by=_KERNEL),
    MlaCase("page_100", (100, 101, 300), page_size=100, refused_by=_KERNEL),
    MlaCase("page_2048", (3, 2049), page_size=2048),
    MlaCase("q_len_2", (0, 1, 2, 131), q_len=2, newest=True, interpret=True),
    MlaCase("q_len_4_short", (2, 3, 64), q_len=4),
    MlaCase("q_len_3_not_causal", (0, 5, 70), q_len=3, causal=False),
    MlaCase("q_len_70", (70, 100), 2, q_len=70),
    MlaCase("splits_1", num_splits=1),
    MlaCase("splits_3", (0, 1, 64, 400), 50, num_splits=3, newest=True, interpret=True),
    MlaCase("float16", dtype="float16"),
    MlaCase("float32", dtype="float32", refused_by=_KERNEL),
    MlaCase("pair", paired=True, newest=True),
    MlaCase("pair_q_len_2", (1, 70), q_len=2, paired=True, rope_dim=32, interpret=True),
    MlaCase("e4m3", cache_dtypes=_E4M3, refused_by=_KERNEL),
    MlaCase("e4m3_tensor", cache_dtypes=_E4M3, scale="tensor", refused_by=_KERNEL),
    MlaCase("e4m3_pair", cache_dtypes=_E4M3, scale="tensor", paired=True, num_splits=2, refused_by=_KERNEL),
    MlaCase("e4m3_latents", cache_dtypes=_LATENTS, scale="tensor", paired=True, refused_by=_KERNEL),
    MlaCase("e4m3_token", (0, 5, 200), rank=512, cache_dtypes=_LATENTS, scale="token", paired=True,
            newest=True, refused_by=_KERNEL),
    MlaCase("e4m3_token_float32", rank=256, dtype="float32", cache_dtypes=("float8_e4m3fn", "float32"),
            scale="token", paired=True, q_len=2, refused_by=_KERNEL),
    MlaCase("int8_tensor", cache_dtypes=_INT8, scale="tensor", dtype="float16", refused_by=_KERNEL),
    MlaCase("all_empty", (0, 0)),
    MlaCase("one_token", (1,)),
    MlaCase("many_rows", tuple(range(0, 160, 4)), 50, interpret=True),
    MlaCase("one_long_row", (1500, 3, 0), interpret=True),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MlaInputs:
    """Arguments of `mla_decode`: positional, those that its reference takes too, and others."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    tuning: dict[str, Any]

    def call(self, module: ModuleType, **options: Any) -> tuple[jax.Array, jax.Array]:
        """Call the function of `module` for (out, lse)."""
        return module.mla_decode(*self.args, return_lse=True, **self.options, **self.tuning, **options)

    def expected(self) -> tuple[jax.Array, jax.Array]:
        """Call the reference for float32 (out, lse)."""
        from jax_paged_attn import reference

        return jax.jit(lambda args: reference.mla_decode(*args, return_lse=True, **self.options))(self.args)


def mla_case(name: str) -> MlaCase:
    """Look up a problem by name."""
    (found,) = (candidate for candidate in MLA_CASES if candidate.name == name)
    return found


def mla_runs() -> list[tuple[str, MlaCase]]:
    """List each (implementation, problem) for the default device: all, or the subset where it interprets."""
    return [
        (candidate.name, case)
        for candidate in dispatch.IMPLEMENTATIONS
        for case in MLA_CASES
        if case.interpret or candidate.name in case.refused_by or not interpreting(candidate.name)
    ]


def make_mla_inputs(case: MlaCase, *, poison: float = np.nan, spare_pages: int = 3) -> MlaInputs:
    """Make a problem's inputs: normal values, pages in random order; `poison` fills every unused slot."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    batch, page_size = len(case.kv_lens), case.page_size
    lead = (batch, case.num_heads) if case.q_len is None else (batch, case.q_len, case.num_heads)
    q_nope, q_pe = (
        jnp.asarray(rng.standard_normal((*lead, columns)).astype(case.dtype))
        for columns in (case.rank, case.rope_dim)
    )
    counts = [-(-kv_len // page_size) for kv_len in case.kv_lens]
    ids = rng.permutation(sum(counts) + spare_pages).astype(np.int32)
    tables = np.split(ids, np.cumsum(counts))[:-1]
    block_tables = np.resize(np.array([-1, 2**31 - 1], np.int32), (batch, max(counts) + 2))
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    pools, scaled = [], case.scale == "token"
    scales = np.full((ids.size, page_size, case.rank // 128), poison, np.float32)
    for part, columns in enumerate((case.rank, case.rope_dim)):
        dtype = jnp.dtype((case.cache_dtypes or (case.dtype,) * 2)[part])
        integers = dtype == np.int8  # which have no NaN
        bad = (0 if poison == 0 else 127) if integers else poison
        pool = np.full((ids.size, page_size, columns), bad, dtype)
        for table, kv_len in zip(tables, case.kv_lens, strict=True):
            tokens = rng.standard_normal((kv_len, columns)) * (30 if integers else 1)
            tokens = (np.clip(np.rint(tokens), -128, 127) if integers else tokens).astype(dtype)
            for entry, page in enumerate(table):
                of_page = tokens[entry * page_size : (entry + 1) * page_size]
                pool[page, : len(of_page)] = of_page
                if part == 0 and scaled:
                    scales[page, : len(of_page)] = rng.lognormal(
                        sigma=0.5, size=(len(of_page), scales.shape[2])
                    )
        pools.append(jnp.asarray(pool))
    latent_pages = tuple(pools) if case.paired else jnp.concatenate(pools, axis=-1)
    options: dict[str, Any] = {"sm_scale": 1.5 / np.sqrt(case.rank + case.rope_dim), "causal": case.causal}
    if case.scale is not None:
        tensor = rng.uniform(0.5, 2) / (30 if case.cache_dtypes == _INT8 else 1)
        options["kv_scale"] = jnp.asarray(scales) if scaled else jnp.float32(tensor)
    table = PageTable.from_block_tables(block_tables, np.array(case.kv_lens))
    return MlaInputs((q_nope, q_pe, latent_pages, table), options, {"num_splits": case.num_splits})
