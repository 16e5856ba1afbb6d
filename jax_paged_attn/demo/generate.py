"""The generation loop: two compiled functions, the page table between them, one token a row and step."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jax_paged_attn import PagePool, explain
from jax_paged_attn.demo.errors import DemoError
from jax_paged_attn.demo.model import LlamaConfig, Params, Sampling, decode_step, empty_cache, prefill
from jax_paged_attn.dispatch import Explanation


@dataclasses.dataclass(frozen=True)
class Options:
    """How to generate.

    Attributes
    ----------
    max_tokens, page_size : int
        The most tokens in an answer; tokens in a page.
    sampling : Sampling
        How each token is picked.
    implementation : str or None
        Of paged_attention; None is its own choice.
    kv_dtype : str or None
        Of the cache; None is that of the weights.
    """

    max_tokens: int
    page_size: int
    sampling: Sampling
    implementation: str | None
    kv_dtype: str | None = None


@dataclasses.dataclass
class Generation:
    """What a generation gave and what it took; times are in seconds, pages are those of one layer.

    `token_bytes` are those of a token's slots in all layers, scales included.
    """

    answers: list[list[int]]
    explanation: Explanation
    kv_dtype: np.dtype
    token_bytes: int
    num_pages: int
    peak_pages: int = 0
    compile_time: float = 0.0
    prefill_time: float = 0.0
    decode_time: float = 0.0


def generate(
    params: Params,
    config: LlamaConfig,
    prompts: Sequence[Sequence[int]],
    options: Options,
    *,
    stop_ids: frozenset[int],
    on_token: Callable[[int, int], None],
) -> Generation:
    """Answer all prompts as one batch; ``on_token(row, token)`` hears of each token as it comes.

    A row ends after `max_tokens` tokens or with a token of `stop_ids`, which is its last. Its pages are then
    free, while the other rows go on.

    Raises
    ------
    DemoError
        If the implementation asked for can't run this model here.
    """
    batch = len(prompts)
    prompt_lens = np.array([len(prompt) for prompt in prompts], np.int32)
    prompt_tokens = np.zeros((batch, prompt_lens.max()), np.int32)
    for row, prompt in enumerate(prompts):
        prompt_tokens[row, : len(prompt)] = prompt

    # The last token of an answer is never written: nothing is attended to after it.
    row_pages = [-(-(len(prompt) + options.max_tokens - 1) // options.page_size) for prompt in prompts]
    num_pages = sum(row_pages)
    # Shuffled, so that the pages of a row lie scattered, as in the pool of a server that has run for a while.
    free_order = np.random.default_rng(options.sampling.seed).permutation(num_pages)
    pool = PagePool(num_pages, options.page_size, free_order=free_order)
    # Without token ids, prompts share no pages: prefill writes all of each one. A row that has ended is -1.
    seq_ids = [pool.allocate(num_tokens=len(prompt)).seq_id for prompt in prompts]
    block_tables = functools.partial(pool.block_tables, seq_ids, width=max(row_pages))

    dtype = params.token_embd.dtype
    cache = empty_cache(config, num_pages, options.page_size, options.kv_dtype or dtype)
    token_bytes = sum(pools.nbytes for pools in jax.tree.leaves(cache)) // (num_pages * options.page_size)
    prefill_fn = functools.partial(
        prefill, config=config, sampling=options.sampling, implementation=options.implementation
    )
    decode_fn = functools.partial(
        decode_step, config=config, sampling=options.sampling, implementation=options.implementation
    )
    prefill_args = (params, cache, prompt_tokens, block_tables(), prompt_lens)
    decode_args = (params, cache, prompt_lens, block_tables(), prompt_lens, np.int32(0))
    try:
        explanation = explain(decode_fn, *decode_args)
    except NotImplementedError as error:
        raise DemoError(str(error)) from error
    generation = Generation([[] for _ in prompts], explanation, cache.k.dtype, token_bytes, num_pages)

    # Compiled ahead: an executable has one signature, so no later step can compile again.
    started = time.perf_counter()
    with matmul_precision(dtype):
        run_prefill = jax.jit(prefill_fn, donate_argnames="cache").lower(*prefill_args).compile()
        run_decode = jax.jit(decode_fn, donate_argnames="cache").lower(*decode_args).compile()
    generation.compile_time = time.perf_counter() - started

    def take(tokens: np.ndarray) -> None:
        """Add a step's tokens to the answers; end their rows, or give them room for what comes next."""
        for row, seq_id in enumerate(seq_ids):
            if seq_id == -1:
                continue
            token, answer = int(tokens[row]), generation.answers[row]
            answer.append(token)
            on_token(row, token)
            if token in stop_ids or len(answer) == options.max_tokens:
                pool.free(seq_id)
                seq_ids[row] = -1
        pool.append_batch(seq_ids)

    started = time.perf_counter()
    next_tokens, cache = run_prefill(*prefill_args)
    tokens = np.asarray(next_tokens)
    generation.prefill_time = time.perf_counter() - started
    take(tokens)

    started = time.perf_counter()
    step = 0
    while (kv_lens := pool.kv_lens(seq_ids)).any():
        step += 1
        next_tokens, cache = run_decode(params, cache, tokens, block_tables(), kv_lens, np.int32(step))
        tokens = np.asarray(next_tokens)
        take(tokens)
    generation.decode_time = time.perf_counter() - started
    generation.peak_pages = pool.stats().peak_used_pages
    return generation


def matmul_precision(dtype: jax.typing.DTypeLike) -> contextlib.AbstractContextManager[None]:
    """Keep float32 matrix products in float32, while tracing within: a GPU would round to TF32."""
    return jax.default_matmul_precision("highest" if np.dtype(dtype) == np.float32 else "default")
