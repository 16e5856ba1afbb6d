"""Prefill of multi-head latent attention with absorbed projections: over one kv head, the latents."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_paged_attn import dispatch, validation
from jax_paged_attn.calls import mla_prefill
from jax_paged_attn.mla import check_new_tokens
from jax_paged_attn.mla_assemble import check_v_form, mla_cache_assemble, mla_q_final_assemble


def mla_prefill_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    sm_scale: ArrayLike,
    causal: bool = True,
    return_lse: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of a prompt's query heads over one kv head, in blocks: scores are never held whole.

    Parameters
    ----------
    q : float[batch, q_len, num_heads, head_dim]
        bfloat16, float16 or float32. Of absorbed latent attention, ``[q_absorbed | q_rope]``.
    k : float[batch, kv_len, 1, head_dim]
        Of q's dtype: ``[kv_latent | k_rope]``.
    v : float[batch, kv_len, 1, v_head_dim]
        Of q's dtype: kv_latent.
    sm_scale : real scalar
        Scale of the scores, may be traced. There is no default: it belongs to the head_dim before absorption.
    causal : bool
        Query token i is token ``kv_len - q_len + i`` and sees none later, or all tokens.
    return_lse : bool
        Whether to return the log-sum-exp of the scores too.
    implementation : str, optional
        "xla"; None takes the first that can run.
    config : optional
        The chosen implementation's own ``Config``; None takes its default.

    Returns
    -------
    out : float[batch, q_len, num_heads, v_head_dim], of q's dtype
        0 for a query without keys.
    lse : float32[batch, q_len, num_heads]
        Natural logarithm, only with `return_lse`; -inf for a query without keys.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.
    NotImplementedError
        If the `implementation` asked for can't run this call, with the reason; or on differentiation:
        `jax_paged_attn.reference.mla_prefill_attention` is differentiable.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import mla_prefill_attention
    >>> q, k, v = jnp.ones((1, 100, 16, 320)), jnp.ones((1, 100, 1, 320)), jnp.ones((1, 100, 1, 256))
    >>> mla_prefill_attention(q, k, v, sm_scale=192**-0.5).shape
    (1, 100, 16, 256)
    """
    q, k, v = (validation.as_array(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    problem = mla_prefill.describe(q, k, v, causal=causal, return_lse=return_lse)
    scale = validation.as_real_scalar("sm_scale", sm_scale)
    # Put on the device by request: a scalar that JAX had to move there by itself would trip a transfer guard.
    scale = scale if isinstance(scale, jax.Array) else jax.device_put(np.float32(scale))
    operands = mla_prefill.Operands(q, jnp.squeeze(k, 2), jnp.squeeze(v, 2), scale)
    out, lse = dispatch.run(
        mla_prefill.MLA_PREFILL, problem, operands, implementation=implementation, config=config
    )
    return out if lse is None else (out, lse)


def mla_fused_prefill(
    q_full: ArrayLike,
    q_rope: ArrayLike,
    kv_latent: ArrayLike,
    k_rope: ArrayLike,
    w_uk: ArrayLike,
    w_uv: ArrayLike,
    *,
    sm_scale: ArrayLike,
    v_form: str = "zeros",
    implementation: str | None = None,
    config: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Causal latent attention of one sequence from its projections to its heads' values.

    Absorption, ``q_nope @ w_uk``; attention over ``[kv_latent | k_rope]``; extraction, ``out @ w_uv``
    (arXiv:2405.04434, section 2.1). The same as causal attention of ``[q_nope | q_rope]`` over each head's
    expanded keys ``[kv_latent @ w_uk.T | k_rope]`` and values ``kv_latent @ w_uv``, which are never made.

    Parameters
    ----------
    q_full : float[num_tokens, num_heads, nope + rope]
        bfloat16, float16 or float32. What follows its `nope` columns is ignored, and may be wider.
    q_rope : float[num_tokens, num_heads, rope]
        Rotated queries. As all below of q_full's dtype.
    kv_latent : float[num_tokens, kv_lora_rank]
    k_rope : float[num_tokens, rope]
        Rotated keys.
    w_uk : float[num_heads, nope, kv_lora_rank]
    w_uv : float[num_heads, kv_lora_rank, v_dim]
    sm_scale : real scalar
        Scale of the scores, ``(nope + rope) ** -0.5`` in the plain model; may be traced.
    v_form : str
        Of the rows of values, as in `mla_cache_assemble`.
    implementation, config : optional
        As in `mla_prefill_attention`.

    Returns
    -------
    out : float[num_tokens, num_heads, v_dim], of q_full's dtype
    k_rows, v_rows : float[num_tokens, kv_lora_rank + rope]
        Rows for the cache, of `mla_cache_assemble`.

    Raises
    ------
    ValueError, NotImplementedError
        As `mla_prefill_attention`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import mla_fused_prefill
    >>> q_full, q_rope = jnp.ones((7, 16, 128 + 64)), jnp.ones((7, 16, 64))
    >>> kv_latent, k_rope = jnp.ones((7, 512)), jnp.ones((7, 64))
    >>> w_uk, w_uv = jnp.ones((16, 128, 512)), jnp.ones((16, 512, 128))
    >>> out, k_rows, v_rows = mla_fused_prefill(
    ...     q_full, q_rope, kv_latent, k_rope, w_uk, w_uv, sm_scale=192**-0.5
    ... )
    >>> out.shape, k_rows.shape
    ((7, 16, 128), (7, 576))
    """
    given = {"q_full": q_full, "q_rope": q_rope, "kv_latent": kv_latent, "k_rope": k_rope}
    given |= {"w_uk": w_uk, "w_uv": w_uv}
    arrays = {name: validation.as_array(name, x) for name, x in given.items()}
    q_full, q_rope, kv_latent, k_rope, w_uk, w_uv = arrays.values()
    check_v_form(v_form)
    num_tokens, rank, rope = check_new_tokens(kv_latent, k_rope)
    expected = f"shape [{num_tokens}, num_heads, nope + {rope}]"
    ok = q_full.ndim == 3 and q_full.shape[0] == num_tokens and q_full.shape[1] != 0
    validation.check(ok, "q_full", expected, f"shape {q_full.shape}")
    heads = q_full.shape[1]
    validation.check_shape("q_rope", q_rope, (num_tokens, heads, rope))
    ok = w_uk.ndim == 3 and w_uk.shape[0] == heads and w_uk.shape[2] == rank
    validation.check(ok, "w_uk", f"shape [{heads}, nope, {rank}]", f"shape {w_uk.shape}")
    nope = w_uk.shape[1]
    got = f"shape {q_full.shape}"
    validation.check(nope <= q_full.shape[2], "q_full", f"at least {nope} columns, as w_uk has", got)
    ok = w_uv.ndim == 3 and w_uv.shape[:2] == (heads, rank)
    validation.check(ok, "w_uv", f"shape [{heads}, {rank}, v_dim]", f"shape {w_uv.shape}")
    for name, x in arrays.items():
        expected = f"the dtype of q_full, {q_full.dtype}"
        validation.check(x.dtype == q_full.dtype, name, expected, f"dtype {x.dtype}")
    precision = jax.lax.Precision.HIGHEST if q_full.dtype == jnp.float32 else None

    def multiply(equation, a, b):
        # XLA accumulates in float32 by itself; asked for it, it has no such product on the CPU (jax 0.11.2).
        return jnp.einsum(equation, a, b, precision=precision)

    q = mla_q_final_assemble(multiply("thn,hnr->thr", q_full[..., :nope], w_uk), q_rope)
    k_rows, v_rows = mla_cache_assemble(kv_latent, k_rope, v_form=v_form)
    latents = mla_prefill_attention(
        q[None],
        k_rows[None, :, None],
        kv_latent[None, :, None],
        sm_scale=sm_scale,
        implementation=implementation,
        config=config,
    )
    assert isinstance(latents, jax.Array)
    return multiply("thr,hrv->thv", latents[0], w_uv), k_rows, v_rows
