"""Multi-head latent attention over a paged cache of latents, as DeepSeek-V2 has it (arXiv:2405.04434)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_paged_attn import dispatch, validation
from jax_paged_attn.calls import append, attention, mla
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.validation import Ints

type LatentPages = ArrayLike | Sequence[ArrayLike]


def mla_decode(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    latent_pages: LatentPages,
    page_table: PageTable,
    *,
    sm_scale: ArrayLike,
    causal: bool = True,
    return_lse: bool = False,
    kv_scale: ArrayLike | None = None,
    num_splits: int | None = None,
    validate_values: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Latent attention of the last query tokens of each row over a paged cache, with absorbed queries.

    All heads share one key a token, ``[kv_latent | k_rope]``, whose latent is its value too: it is read once.
    The query of head h is absorbed, ``q_nope = q @ w_uk[h]``, and so the output is a mean of latents, from
    which ``out @ w_uv[h]`` extracts the head's values. Whatever unused slots, pages and table entries hold
    (NaN too) changes no bit of the result. Lengths and tables are data: one compilation serves a shape.

    Parameters
    ----------
    q_nope : float[batch, num_heads, kv_lora_rank] or float[batch, q_len, num_heads, kv_lora_rank]
        Absorbed queries in bfloat16, float16 or float32: of one token a row, or of its last q_len tokens
        (speculative decoding). Without any of the leading axes, `page_table` must be unbatched too.
    q_pe : float[.., rope_dim]
        Rotated queries, with the other axes and the dtype of q_nope.
    latent_pages : float or int8[num_pages, page_size, kv_lora_rank + rope_dim], or a pair
        The pool of ``[kv_latent | k_rope]``, or a pair ``(ckv_pages, kpe_pages)`` of the two parts'. Of
        q_nope's dtype, or quantized as float8_e4m3fn, float8_e5m2 or int8; kpe_pages may keep q_nope's dtype.
    page_table : PageTable
        Lengths outside ``[0, row_pages * page_size]`` and page ids outside the pool are clipped.
    sm_scale : real scalar
        Scale of the scores, may be traced. There is no default: it belongs to the head_dim before absorption,
        ``(nope_dim + rope_dim) ** -0.5``, which the arrays don't tell.
    causal : bool
        Query token i of q_len is token ``kv_len - q_len + i`` of its row and sees none later, or all tokens.
    return_lse : bool
        Whether to return the log-sum-exp of the scores too.
    kv_scale : float, optional
        Of a quantized pool: a stored value counts as itself times the scale. A scalar (for kpe_pages too, if
        these are quantized), or one a token and 128 channels of the latent,
        [num_pages, page_size, kv_lora_rank / 128], beside a kpe_pages of q_nope's dtype. None is 1.
    num_splits : int, optional
        Cuts each row into this many runs of tiles, as in `paged_attention`. None lets the implementation cut.
    validate_values : bool
        Also check page ids, lengths, and that a scalar scale is positive and finite: ValueError for concrete
        arrays, `jax.experimental.checkify` checks for traced ones.
    implementation : str, optional
        "mosaic_gpu" (Pallas kernels; interpreted on CPU) or "xla"; None takes the first that can run.
    config : optional
        The chosen implementation's own ``Config``; None takes its default.

    Returns
    -------
    out : float, of q_nope's shape and dtype
        0 for a query without keys.
    lse : float32, of q_nope's shape without kv_lora_rank
        Natural logarithm, only with `return_lse`; -inf for a query without keys.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.
    NotImplementedError
        If the `implementation` asked for can't run this call, with the reason; or on differentiation:
        `jax_paged_attn.reference.mla_decode` is differentiable.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import PageTable, mla_decode
    >>> page_table = PageTable.from_block_tables([[2, 0], [1, -1]], [20, 3])
    >>> latent_pages = jnp.ones((3, 16, 512 + 64))  # 3 pages, 16 tokens a page
    >>> q_nope, q_pe = jnp.ones((2, 128, 512)), jnp.ones((2, 128, 64))
    >>> mla_decode(q_nope, q_pe, latent_pages, page_table, sm_scale=(128 + 64) ** -0.5).shape
    (2, 128, 512)
    """
    q_nope, q_pe = validation.as_array("q_nope", q_nope), validation.as_array("q_pe", q_pe)
    pools = mla.as_pools(latent_pages)
    page_table = validation.as_page_table(page_table)
    kv_scale = validation.as_optional_array("kv_scale", kv_scale)
    validation.check_bool("validate_values", validate_values)
    expected = "shape [batch, (q_len,) num_heads, kv_lora_rank] or [num_heads, kv_lora_rank]"
    validation.check(q_nope.ndim in (2, 3, 4), "q_nope", expected, f"shape {q_nope.shape}")
    lead = q_nope.shape[:-1]
    expected = f"shape {(*lead, 'rope_dim')}"
    validation.check(
        q_pe.ndim == q_nope.ndim and q_pe.shape[:-1] == lead, "q_pe", expected, f"shape {q_pe.shape}"
    )
    if q_nope.ndim == 2:
        validation.check(
            page_table.kv_lens.ndim == 0,
            "page_table",
            "an unbatched table, as q_nope has no batch axis",
            f"kv_lens of shape {page_table.kv_lens.shape}",
        )
        page_table = page_table.as_batched()
    # Every form has one query token a row, or as many as it says.
    rows = lead if len(lead) == 3 else (*lead[:-1], 1, lead[-1]) if len(lead) == 2 else (1, 1, *lead)
    q_nope, q_pe = q_nope.reshape(*rows, q_nope.shape[-1]), q_pe.reshape(*rows, q_pe.shape[-1])
    problem = mla.describe(
        q_nope,
        q_pe,
        pools,
        page_table,
        kv_scale,
        causal=causal,
        return_lse=return_lse,
        num_splits=num_splits,
    )
    scale = validation.as_real_scalar("sm_scale", sm_scale)
    if validate_values:
        validation.check_scales(kv_scale=kv_scale if problem.kv_scale == "tensor" else None)
        attention.check_table(page_table, page_size=problem.page_size, num_pages=problem.num_pages)
    # Put on the device by request: a scalar that JAX had to move there by itself would trip a transfer guard.
    scale = scale if isinstance(scale, jax.Array) else jax.device_put(np.float32(scale))
    operands = mla.Operands(
        q_nope, q_pe, pools.latent_pages, pools.rope_pages, page_table, scale, _as_scale(kv_scale)
    )
    results = dispatch.run(mla.MLA, problem, operands, implementation=implementation, config=config)
    out, lse = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[3:]), results)
    return out if lse is None else (out, lse)


def append_paged_mla_kv(
    latent_pages: LatentPages,
    kv_latent: ArrayLike,
    k_rope: ArrayLike,
    slot_mapping: Ints,
    *,
    kv_scale: ArrayLike | None = None,
    kv_scale_pages: ArrayLike | None = None,
    validate_values: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Any:
    """Write the latents and rotated keys of new tokens into slots of a page pool.

    In place where the caller's ``jax.jit`` donates `latent_pages`, as `append_paged_kv`, which says more. The
    row ``[kv_latent | k_rope]`` is made on the way. Of tokens with equal slots the last one is kept.

    Parameters
    ----------
    latent_pages : float or int8[num_pages, page_size, kv_lora_rank + rope_dim], or a pair
        The pool, or the pair ``(ckv_pages, kpe_pages)``, as in `mla_decode`. Quantized as `append_paged_kv`
        does it.
    kv_latent : float[num_tokens, kv_lora_rank]
        bfloat16, float16 or float32.
    k_rope : float[num_tokens, rope_dim]
        Rotated keys, of kv_latent's dtype.
    slot_mapping : int[num_tokens]
        Slot of each token: ``page_id * page_size + offset``. Negative slots, and those past the pool, are
        skipped. `jax_paged_attn.slot_mapping` computes it from a page table.
    kv_scale : float, optional
        Of a quantized pool: a scalar (for kpe_pages too, if these are quantized), or one a token and 128
        channels of the latent, [num_tokens, kv_lora_rank / 128], which `kv_scale_pages` then keep; `kv_scale`
        (the function) of latents viewed as heads of 128 channels finds such. None is 1.
    kv_scale_pages : float32[num_pages, page_size, kv_lora_rank / 128], optional
        The pool of the scales of tokens.
    validate_values : bool
        Also check that no slot lies past the pool and that scales are positive and finite.
    implementation : str, optional
        "mosaic_gpu" (a Pallas kernel; interpreted on CPU) or "xla"; None takes the first that can run.
    config : optional
        The chosen implementation's own ``Config``; None takes its default.

    Returns
    -------
    latent_pages
        In the form given; with `kv_scale_pages`, a tuple of that and the updated scales.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.
    NotImplementedError
        If the `implementation` asked for can't run this call, with the reason; or on differentiation.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import append_paged_mla_kv, kv_scale
    >>> pages = jnp.zeros((3, 16, 512 + 64))
    >>> kv_latent, k_rope = jnp.ones((2, 512)), jnp.full((2, 64), 2.0)
    >>> pages = append_paged_mla_kv(pages, kv_latent, k_rope, [37, -1])
    >>> pages[2, 4:7, ::512].tolist()  # slot 37 is slot 5 of page 2
    [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]

    Quantized, with a scale a token and 128 channels:

    >>> pair = jnp.zeros((3, 16, 512), jnp.float8_e4m3fn), jnp.zeros((3, 16, 64))
    >>> scale = kv_scale(kv_latent.reshape(2, 4, 128), jnp.float8_e4m3fn, granularity="token")
    >>> (ckv_pages, kpe_pages), kv_scale_pages = append_paged_mla_kv(
    ...     pair, kv_latent, k_rope, [37, -1], kv_scale=scale, kv_scale_pages=jnp.ones((3, 16, 4))
    ... )
    >>> (ckv_pages[2, 5].astype(float)[::128] * kv_scale_pages[2, 5]).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    pools = mla.as_pools(latent_pages)
    kv_latent, k_rope = validation.as_array("kv_latent", kv_latent), validation.as_array("k_rope", k_rope)
    slots = validation.as_int32("slot_mapping", slot_mapping)
    scale = validation.as_optional_array("kv_scale", kv_scale)
    scale_pages = validation.as_optional_array("kv_scale_pages", kv_scale_pages)
    validation.check_bool("validate_values", validate_values)
    num_tokens, rank, rope_dim = check_new_tokens(kv_latent, k_rope)
    validation.check_shape("slot_mapping", slots, (num_tokens,))
    dtype = np.dtype(kv_latent.dtype)
    expected = f"a dtype of {validation.DTYPES}"
    validation.check(dtype.name in validation.DTYPES, "kv_latent", expected, f"dtype {dtype}")
    mla.check_pools(pools, rank, rope_dim, dtype, "kv_latent")
    kind = mla.scale_kind(pools, scale, rank, dtype, (num_tokens,))
    num_pages, page_size, _ = pools.latent_pages.shape
    # As the cache of one kv head: the latent is its key, the rotated key its value. Where scales belong to
    # channels, these make heads, and rotated keys fall into as many.
    heads = rank // mla.SCALE_CHANNELS if kind == "token" else 1
    expected = f"a multiple of {heads} columns, as kv_scale is one a token and {mla.SCALE_CHANNELS} channels"
    validation.check(rope_dim % heads == 0, "k_rope", expected, f"shape {k_rope.shape}")
    if kind == "token":
        expected = "room for the scales of kv_scale"
        validation.check(scale_pages is not None, "kv_scale_pages", expected, "None")
    if scale_pages is not None:
        expected = f"a kv_scale of shape ({num_tokens}, {rank // mla.SCALE_CHANNELS}) for kv_scale_pages"
        got = "None" if scale is None else f"shape {scale.shape}"
        validation.check(kind == "token", "kv_scale", expected, got)
        validation.check_shape("kv_scale_pages", scale_pages, (num_pages, page_size, heads))
        got = f"dtype {scale_pages.dtype}"
        validation.check(scale_pages.dtype == jnp.float32, "kv_scale_pages", "dtype float32", got)

    def split(x):
        return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)

    rope_pages = pools.rope_pages
    rope_dtype = (pools.latent_pages if rope_pages is None else rope_pages).dtype
    scaled_rope = kind == "tensor" and rope_dtype == pools.latent_pages.dtype
    problem = append.Problem(
        num_tokens=num_tokens,
        num_kv_heads=heads,
        head_dim=rank // heads,
        v_head_dim=rope_dim // heads,
        page_size=page_size,
        num_pages=num_pages,
        dtype=dtype,
        k_dtype=np.dtype(pools.latent_pages.dtype),
        v_dtype=np.dtype(rope_dtype),
        kv_layout="NHD",
        k_scale=kind,
        v_scale=kind if scaled_rope else None,
        joined=rope_pages is None,
    )
    if validate_values:
        append.check_slots(problem, slots)
        validation.check_scales(kv_scale=scale)
    scale = _as_scale(scale)
    operands = append.Operands(
        k_pages=split(pools.latent_pages),
        v_pages=None if rope_pages is None else split(rope_pages),
        k_new=split(kv_latent),
        v_new=split(k_rope),
        slots=slots,
        k_scale=scale,
        v_scale=scale if scaled_rope else None,
        k_scale_pages=scale_pages,
    )
    results = dispatch.run(append.APPEND, problem, operands, implementation=implementation, config=config)
    pages = results.k_pages.reshape(pools.latent_pages.shape)
    if rope_pages is not None:
        pages = pages, results.v_pages.reshape(rope_pages.shape)
    return pages if scale_pages is None else (pages, results.k_scale_pages)


def check_new_tokens(kv_latent: jax.Array, k_rope: jax.Array) -> tuple[int, int, int]:
    """Check latents and rotated keys of tokens against each other; give their number and columns."""
    expected = "shape [num_tokens, kv_lora_rank], kv_lora_rank at least 1"
    ok = kv_latent.ndim == 2 and kv_latent.shape[1] != 0
    validation.check(ok, "kv_latent", expected, f"shape {kv_latent.shape}")
    num_tokens, rank = kv_latent.shape
    ok = k_rope.ndim == 2 and k_rope.shape[0] == num_tokens and k_rope.shape[1] != 0
    expected = f"shape [{num_tokens}, rope_dim], rope_dim at least 1"
    validation.check(ok, "k_rope", expected, f"shape {k_rope.shape}")
    expected = f"the dtype of kv_latent, {kv_latent.dtype}"
    validation.check(k_rope.dtype == kv_latent.dtype, "k_rope", expected, f"dtype {k_rope.dtype}")
    return num_tokens, rank, k_rope.shape[1]


def _as_scale(scale: jax.Array | None) -> jax.Array | None:
    """A float32 array with an axis."""
    return None if scale is None else jnp.atleast_1d(scale.astype(jnp.float32))
