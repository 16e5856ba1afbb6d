"""A Llama decoder over a paged KV cache: the part to copy into a model of your own.

Tokens are flat, ``[tokens, ...]``: the newest of each row while decoding, every prompt's tokens one after
the other in prefill. A layer does the same for both and leaves to an ``attend`` function where keys and
values are kept and how they are attended to; `decode_step` passes one that calls `append_paged_kv` and
`paged_attention`.

The caches of all layers are one array each for K and V, donated by the caller's jit and carried through the
scan over layers, so that a step writes its few new slots in place. A layer finds its pages by shifting the
page ids, since slicing its part out of the array would copy the whole pool.

A cache of a 1-byte dtype is quantized: each head of each token has a scale of its own, which needs no
calibration, and which is kept in pages beside the token's.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_paged_attn import PageTable, append_paged_kv, apply_rope, kv_scale, paged_attention, slot_mapping


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The static description of a Llama model.

    Attributes
    ----------
    num_layers, hidden_size, num_q_heads, num_kv_heads, head_dim, vocab_size : int
        The shapes of the weights; `num_q_heads` is a multiple of `num_kv_heads`.
    context_length : int
        The most tokens, prompt and answer together, that the model was trained for.
    rms_norm_eps : float
        Added to the mean square inside the norms.
    window : int or None
        How many tokens a token attends to at most, itself and those before it; None is all.
    """

    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    window: int | None = None

    @property
    def window_left(self) -> int | None:
        """The window as `paged_attention` counts it, without the token itself."""
        return None if self.window is None else self.window - 1


class Layers(NamedTuple):
    """The weights of all layers, stacked: the leading axis is num_layers; matrices are ``[out, in]``."""

    attn_norm: jax.Array
    attn_q: jax.Array
    attn_k: jax.Array
    attn_v: jax.Array
    attn_output: jax.Array
    ffn_norm: jax.Array
    ffn_gate: jax.Array
    ffn_up: jax.Array
    ffn_down: jax.Array


class Params(NamedTuple):
    """All weights of a model; `output` is `token_embd` itself where the two are tied.

    `inv_freq` is float32 ``[rotary_dim / 2]``, any rope scaling already applied.
    """

    token_embd: jax.Array
    layers: Layers
    output_norm: jax.Array
    output: jax.Array
    inv_freq: jax.Array


class KVCache(NamedTuple):
    """Layer-stacked page pools, each ``[num_layers, num_pages, num_kv_heads, page_size, head_dim]``.

    A quantized cache also has pools of scales, float32, without head_dim.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None


class Sampling(NamedTuple):
    """How a token is picked: the highest score, with noise of this temperature (0 is greedy) and seed."""

    temperature: float = 0.0
    seed: int = 0


def empty_cache(config: LlamaConfig, num_pages: int, page_size: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """Make page pools of `num_pages` pages a layer, filled with zeros."""
    shape = (config.num_layers, num_pages, config.num_kv_heads, page_size, config.head_dim)
    cache = KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    if cache.k.dtype.itemsize > 1:
        return cache
    return cache._replace(k_scale=jnp.zeros(shape[:-1]), v_scale=jnp.zeros(shape[:-1]))


def decode_step(
    params: Params,
    cache: KVCache,
    tokens: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    step: jax.Array,
    *,
    config: LlamaConfig,
    sampling: Sampling,
    implementation: str | None,
) -> tuple[jax.Array, KVCache]:
    """Append the newest tokens of every row and pick what follows each: the decode step, to be jitted once.

    With one token a row this is plain decoding. Of several, those after the first are drafts: what is picked
    after each tells whether the next one is right.

    Parameters
    ----------
    params, cache
        The model and its page pools; donate the cache so that it is updated in place.
    tokens : int32[batch, q_len]
        The last tokens of each row, whose keys and values this step writes.
    block_tables : int32[batch, max_pages_per_row]
        The pages of each row, in order. Entries that a row doesn't use yet can hold anything.
    kv_lens : int32[batch]
        The tokens of each row, these included; 0 leaves a row out.
    step : int32 scalar
        Which token of the answer this picks, counted from 0: it selects the sampling noise.
    config, sampling, implementation
        Static.

    Returns
    -------
    (int32[batch, q_len], KVCache)
        What follows each token, and the cache with the new keys and values.
    """
    batch, q_len = tokens.shape
    page_table = PageTable.from_block_tables(block_tables, kv_lens)
    positions = (kv_lens[:, None] - q_len + jnp.arange(q_len, dtype=jnp.int32)[None]).reshape(-1)
    num_pages, page_size = cache.k.shape[1], cache.k.shape[3]
    rows = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), q_len)
    slots = slot_mapping(page_table, rows, positions, page_size=page_size)

    def attend(pools, layer, q, k, v):
        pools = write(pools, k, v, _in_layer(slots, layer, num_pages * page_size), implementation)
        layer_table = dataclasses.replace(page_table, indices=page_table.indices + layer * num_pages)
        out = read(
            pools, q.reshape(batch, q_len, *q.shape[1:]), layer_table, implementation, config.window_left
        )
        return out.reshape(q.shape), pools

    x, cache = _over_pools(params, config, tokens.reshape(-1), positions, cache, attend)
    picked = pick(scores(logits(params, config, x), step, sampling))
    return picked.reshape(batch, q_len), cache


def prefill(
    params: Params,
    cache: KVCache,
    tokens: jax.Array,
    block_tables: jax.Array,
    prompt_lens: jax.Array,
    *,
    config: LlamaConfig,
    sampling: Sampling,
    implementation: str | None,
) -> tuple[jax.Array, KVCache]:
    """Put whole prompts into the pages and pick the first token of each answer.

    `tokens` is int32 ``[batch, max_prompt_len]``, padded at the end with anything. Attention is dense and
    causal over the prompts alone, whose keys and values it takes as they are, before any rounding to the
    cache's dtype: the cache holds nothing before them. The rest is as in `decode_step`.
    """
    batch, length = tokens.shape
    num_pages, page_size = cache.k.shape[1], cache.k.shape[3]
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    rows = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), length)
    page_table = PageTable.from_block_tables(block_tables, prompt_lens)
    slots = slot_mapping(page_table, rows, positions, page_size=page_size)  # none for padding

    def attend(pools, layer, q, k, v):
        pools = write(pools, k, v, _in_layer(slots, layer, num_pages * page_size), implementation)
        q, k, v = (a.reshape(batch, length, *a.shape[1:]) for a in (q, k, v))
        # Padding comes after a prompt's own tokens, so causality alone hides it from them.
        return causal_attention(q, k, v, config.window).reshape(batch * length, *q.shape[2:]), pools

    x, cache = _over_pools(params, config, tokens.reshape(-1), positions, cache, attend)
    last = jnp.arange(batch, dtype=jnp.int32) * length + prompt_lens - 1
    first_step = jnp.zeros((), jnp.int32)
    return pick(scores(logits(params, config, x[last]), first_step, sampling)), cache


def write(
    pools: KVCache, k: jax.Array, v: jax.Array, slots: jax.Array, implementation: str | None
) -> KVCache:
    """Write k and v ``[tokens, num_kv_heads, head_dim]`` into slots, in the dtype of the pages."""
    dtype = pools.k.dtype
    if pools.k_scale is None:
        k, v = k.astype(dtype), v.astype(dtype)
        return KVCache(*append_paged_kv(pools.k, pools.v, k, v, slots, implementation=implementation))
    written = append_paged_kv(
        pools.k,
        pools.v,
        k,
        v,
        slots,
        k_scale=kv_scale(k, dtype, granularity="token"),
        v_scale=kv_scale(v, dtype, granularity="token"),
        k_scale_pages=pools.k_scale,
        v_scale_pages=pools.v_scale,
        implementation=implementation,
    )
    return KVCache(*written)


def read(
    pools: KVCache,
    q: jax.Array,
    page_table: PageTable,
    implementation: str | None,
    window_left: int | None = None,
) -> jax.Array:
    """Attend with q ``[batch, (q_len,) num_q_heads, head_dim]`` to the pages of each row."""
    # Pages that aren't quantized are read by a query of their own dtype.
    query = q.astype(pools.k.dtype) if pools.k_scale is None else q
    out = paged_attention(
        query,
        pools.k,
        pools.v,
        page_table,
        window_left=window_left,
        k_scale=pools.k_scale,
        v_scale=pools.v_scale,
        implementation=implementation,
    )
    return jnp.asarray(out, q.dtype)


def run_layers[State](
    params: Params,
    config: LlamaConfig,
    tokens: jax.Array,
    positions: jax.Array,
    state: State,
    attend: Callable[..., tuple[jax.Array, State]],
) -> tuple[jax.Array, State]:
    """Embed `tokens` and scan over the layers; ``attend(state, layer, q, k, v) -> (out, state)``.

    q, k, v and out are ``[tokens, heads, head_dim]``; `layer` is a traced scalar. Returns the hidden states
    ``[tokens, hidden_size]``, before the last norm, and the state after the last layer.
    """
    x = params.token_embd[tokens]
    num_tokens = x.shape[0]

    def layer_step(carry, scanned):
        x, state = carry
        layer, w = scanned
        h = rms_norm(x, w.attn_norm, config.rms_norm_eps)
        q = linear(h, w.attn_q).reshape(num_tokens, config.num_q_heads, config.head_dim)
        k = linear(h, w.attn_k).reshape(num_tokens, config.num_kv_heads, config.head_dim)
        v = linear(h, w.attn_v).reshape(num_tokens, config.num_kv_heads, config.head_dim)
        # Files of the llama architecture store the rows of q's and k's weights so that pairs are neighbours.
        q, k = (apply_rope(a, positions, inv_freq=params.inv_freq, interleaved=True) for a in (q, k))
        attended, state = attend(state, layer, q, k, v)
        x = x + linear(attended.reshape(num_tokens, -1), w.attn_output)
        h = rms_norm(x, w.ffn_norm, config.rms_norm_eps)
        x = x + linear(jax.nn.silu(linear(h, w.ffn_gate)) * linear(h, w.ffn_up), w.ffn_down)
        return (x, state), None

    layer_ids = jnp.arange(config.num_layers, dtype=jnp.int32)
    (x, state), _ = jax.lax.scan(layer_step, (x, state), (layer_ids, params.layers))
    return x, state


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Scale each token of x ``[tokens, hidden]`` to a mean square of 1, in float32, then by `weight`."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight[None, :]


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply x ``[tokens, in]`` by weight ``[out, in]``, the layout that GGUF files store."""
    return jnp.einsum("ti,oi->to", x, weight)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None = None) -> jax.Array:
    """Attend densely and causally, in float32; q, k and v are ``[batch, length, heads, head_dim]``."""
    batch, length, num_kv_heads, head_dim = k.shape
    grouped = q.reshape(batch, length, num_kv_heads, -1, head_dim).astype(jnp.float32)
    attention = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k.astype(jnp.float32)) * head_dim**-0.5
    visible = jnp.tri(length, dtype=bool)
    if window is not None:
        visible &= ~jnp.tri(length, k=-window, dtype=bool)
    weights = jax.nn.softmax(jnp.where(visible[None, None, None], attention, -jnp.inf), axis=-1)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v.astype(jnp.float32)).reshape(q.shape).astype(q.dtype)


def logits(params: Params, config: LlamaConfig, x: jax.Array) -> jax.Array:
    """Apply the last norm and the output head: float32 ``[tokens, vocab_size]``."""
    h = rms_norm(x, params.output_norm, config.rms_norm_eps)
    return jnp.einsum("ti,vi->tv", h, params.output, preferred_element_type=jnp.float32)


def scores(logits: jax.Array, step: jax.Array, sampling: Sampling) -> jax.Array:
    """Add Gumbel noise of the sampling temperature: then the argmax is a sample of the softmax."""
    if sampling.temperature == 0:
        return logits
    key = jax.random.fold_in(jax.random.key(sampling.seed), step)
    return logits + sampling.temperature * jax.random.gumbel(key, logits.shape, logits.dtype)


def pick(scores: jax.Array) -> jax.Array:
    """Pick the token of the highest score in each row, int32."""
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def _over_pools(params, config, tokens, positions, cache, attend):
    """`run_layers` with the page pools of all layers seen as one, [num_layers * num_pages, ...]."""
    merged = jax.tree.map(lambda pages: pages.reshape(-1, *pages.shape[2:]), cache)
    x, merged = run_layers(params, config, tokens, positions, merged, attend)
    return x, jax.tree.map(lambda new, old: new.reshape(old.shape), merged, cache)


def _in_layer(slots: jax.Array, layer: jax.Array, slots_per_layer: int) -> jax.Array:
    """Slots of a layer in the pool of all layers; those below 0 stay there."""
    return jnp.where(slots < 0, slots, slots + layer * slots_per_layer)
