"""``--check``: the same answers from a dense, unpaged cache and plain jnp attention.

The answers are replayed token by token, and before each token the dense cache must pick that very token.
Where this holds for all of them, the dense cache by itself would have given the same answers.

In float32 each token must be the dense cache's. In a narrower dtype, of the weights or of the cache, two
tokens can lie closer together than the rounding of their scores, and then either may come out. How far
rounding can go is measured, not set: a second replay, with the same weights and all in float32, shows the
error E of the dense cache's scores, the largest over the vocabulary. A run whose scores err by at most E
picks a token at most 2 E below the float32 maximum: no token may lie further below it.

The dense cache is quantized as the pages are. This alone makes no token certain: a last bit of float32
decides which way a value in the middle between two stored ones goes, and later layers amplify that.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged_attn import kv_quantize
from jax_paged_attn.demo.errors import DemoError
from jax_paged_attn.demo.generate import matmul_precision
from jax_paged_attn.demo.model import LlamaConfig, Params, Sampling, logits, run_layers, scores


class DenseCache(NamedTuple):
    """Keys and values by position, float32 ``[num_layers, batch, capacity, num_kv_heads, head_dim]``."""

    k: jax.Array
    v: jax.Array


class Agreement(NamedTuple):
    """How many tokens were compared, and how many of them rounding made differ from the dense cache's."""

    num_tokens: int
    num_near_ties: int

    def __str__(self) -> str:
        if self.num_near_ties == 0:
            return f"a dense, unpaged cache gives the same {self.num_tokens} tokens"
        same = self.num_tokens - self.num_near_ties
        return f"a dense, unpaged cache gives {same} of {self.num_tokens} tokens, near ties for the others"


def check_answers(
    params: Params,
    config: LlamaConfig,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    sampling: Sampling,
    kv_dtype: np.dtype,
) -> Agreement:
    """Compare `answers` with what a dense cache of `kv_dtype` picks in the dtype of `params`.

    Raises
    ------
    DemoError
        If a token is not the one that the dense cache picks and rounding cannot explain it.
    """
    replay = _replay(params, config, prompts, answers, sampling, kv_dtype)
    if params.token_embd.dtype == kv_dtype == jnp.float32:
        steps = ((step_scores, step_scores) for step_scores in replay)
    else:
        exact_params = jax.tree.map(lambda weights: weights.astype(jnp.float32), params)
        exact_dtype = np.dtype(np.float32)
        exact_replay = _replay(exact_params, config, prompts, answers, sampling, exact_dtype)
        steps = zip(replay, exact_replay, strict=True)
    num_tokens = num_near_ties = 0
    for step, (step_scores, exact_scores) in enumerate(steps):
        for row, answer in enumerate(answers):
            if step >= len(answer):
                continue
            dense, exact, token = step_scores[row], exact_scores[row], answer[step]
            rounding = 2 * np.abs(dense - exact).max()
            below = exact.max() - exact[token]
            # Written so that a NaN anywhere fails.
            if not below <= rounding:
                raise DemoError(
                    f"check failed: token {step} of answer {row + 1} is {token} from the paged cache, "
                    f"{exact.argmax()} from a dense one; its score is {below:.3g} lower, "
                    f"and rounding explains {rounding:.3g}"
                )
            num_tokens += 1
            num_near_ties += int(token != dense.argmax())
    return Agreement(num_tokens, num_near_ties)


def _replay(
    params: Params,
    config: LlamaConfig,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    sampling: Sampling,
    kv_dtype: np.dtype,
) -> Iterator[np.ndarray]:
    """Yield for each step the scores [batch, vocab_size] by which a dense cache picks its tokens."""
    batch, dtype = len(prompts), params.token_embd.dtype
    prompt_lens = np.array([len(prompt) for prompt in prompts], np.int32)
    sequences = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = np.zeros((batch, max(map(len, sequences))), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence

    shape = (config.num_layers, batch, tokens.shape[1], config.num_kv_heads, config.head_dim)
    cache = DenseCache(jnp.zeros(shape), jnp.zeros(shape))
    advance = functools.partial(_advance, config=config, sampling=sampling, kv_dtype=kv_dtype)
    advance = jax.jit(advance, donate_argnames="cache", static_argnames="is_prompt")
    zeros = np.zeros(batch, np.int32)
    with matmul_precision(dtype):
        heads = tokens[:, : prompt_lens.max()]
        step_scores, cache = advance(
            params, cache, heads, zeros, prompt_lens - 1, np.int32(0), is_prompt=True
        )
    yield np.asarray(step_scores)
    for step in range(1, max(map(len, answers))):
        # A row whose answer is over repeats its last position: its scores are not looked at.
        positions = np.minimum(prompt_lens + step - 1, tokens.shape[1] - 1).astype(np.int32)
        newest = np.take_along_axis(tokens, positions[:, None], axis=1)
        with matmul_precision(dtype):
            step_scores, cache = advance(params, cache, newest, positions, zeros, np.int32(step))
        yield np.asarray(step_scores)


def _advance(
    params: Params,
    cache: DenseCache,
    tokens: jax.Array,
    starts: jax.Array,
    last: jax.Array,
    step: jax.Array,
    *,
    config: LlamaConfig,
    sampling: Sampling,
    kv_dtype: np.dtype,
    is_prompt: bool = False,
) -> tuple[jax.Array, DenseCache]:
    """Append tokens [batch, n] at positions ``starts + 0, 1, ..`` and score what follows each row's `last`.

    Padding after a short prompt is written too, and overwritten before any token of its row attends to it.
    Prompts attend to their own keys and values before any rounding to `kv_dtype`, as in prefill.
    """
    batch, n = tokens.shape
    capacity = cache.k.shape[2]
    positions = starts[:, None] + jnp.arange(n, dtype=jnp.int32)[None, :]
    rows = jnp.arange(batch)[:, None]
    distance = positions[:, :, None] - jnp.arange(capacity, dtype=jnp.int32)[None, None, :]
    visible = (distance >= 0) & (distance < (config.window or capacity))

    def attend(cache, layer, q, k, v):
        k, v = (new.reshape(batch, n, *new.shape[1:]) for new in (k, v))
        here = (layer, rows, positions)
        cache = DenseCache(cache.k.at[here].set(_kept(k, kv_dtype)), cache.v.at[here].set(_kept(v, kv_dtype)))
        keys, values = cache.k[layer], cache.v[layer]
        if is_prompt:
            k, v = k.astype(jnp.float32), v.astype(jnp.float32)
            keys, values = keys.at[rows, positions].set(k), values.at[rows, positions].set(v)
        # Pages that aren't quantized are read by a query of their own dtype, which the result has too.
        rounded = q.astype(q.dtype if is_prompt or kv_dtype.itemsize == 1 else kv_dtype)
        # [batch, n, kv heads, query heads of each, head_dim]
        grouped = rounded.reshape(batch, n, config.num_kv_heads, -1, config.head_dim).astype(jnp.float32)
        attention = jnp.einsum("bnhgd,bshd->bnhgs", grouped, keys) * config.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(visible[:, :, None, None, :], attention, -jnp.inf), axis=-1)
        out = jnp.einsum("bnhgs,bshd->bnhgd", weights, values)
        return out.reshape(q.shape).astype(rounded.dtype).astype(q.dtype), cache

    x, cache = run_layers(params, config, tokens.reshape(-1), positions.reshape(-1), cache, attend)
    ends = jnp.arange(batch, dtype=jnp.int32) * n + last
    return scores(logits(params, config, x[ends]), step, sampling), cache


def _kept(new: jax.Array, kv_dtype: np.dtype) -> jax.Array:
    """What a cache gives back of keys or values [batch, n, num_kv_heads, head_dim], float32."""
    if kv_dtype.itemsize > 1:
        return new.astype(kv_dtype).astype(jnp.float32)
    stored, scale = kv_quantize(new, kv_dtype, granularity="token", kv_layout="NHD")
    return stored.astype(jnp.float32) * scale[..., None]
