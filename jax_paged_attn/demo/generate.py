"""The generation loop: two compiled functions, the page table between them, some tokens a row and step."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jax_paged_attn import PagePool, explain
from jax_paged_attn.demo.draft import NgramDrafter, count_agreeing
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
    num_drafts : int
        The most tokens to draft for each row and step; `sampling` must be greedy unless it is 0.
    """

    max_tokens: int
    page_size: int
    sampling: Sampling
    implementation: str | None
    kv_dtype: str | None = None
    num_drafts: int = 0


@dataclasses.dataclass
class Generation:
    """What a generation gave and what it took; times are in seconds, pages are those of one layer.

    `token_bytes` are those of a token's slots in all layers, scales included; `num_steps` counts those after
    prefill.
    """

    answers: list[list[int]]
    explanation: Explanation
    kv_dtype: np.dtype
    token_bytes: int
    num_pages: int
    peak_pages: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
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

    # The last token of an answer is never written, as nothing is attended to after it; drafts are.
    most_written = options.max_tokens - 1 + options.num_drafts
    row_pages = [-(-(len(prompt) + most_written) // options.page_size) for prompt in prompts]
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
    q_len = 1 + options.num_drafts
    newest = np.zeros((batch, q_len), np.int32)  # of each row, its newest token and the drafts that follow it
    decode_args = (params, cache, newest, block_tables(), prompt_lens, np.int32(0))
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

    drafters = [NgramDrafter(prompt) for prompt in prompts]
    drafts: list[list[int]] = [[] for _ in prompts]

    def take(picked: np.ndarray, kv_lens: np.ndarray) -> None:
        """Add what a step of these lengths picked, [batch, q_len], to the answers, to the first wrong draft.

        Then end their rows, or draft what comes next and give it room.
        """
        for row, seq_id in enumerate(seq_ids):
            if seq_id == -1:
                continue
            answer, num_before = generation.answers[row], len(generation.answers[row])
            num_right, ended = count_agreeing(drafts[row], picked[row].tolist()), False
            for token in picked[row, : num_right + 1].tolist():
                answer.append(token)
                drafters[row].add(token)
                on_token(row, token)
                ended = token in stop_ids or len(answer) == options.max_tokens
                if ended:
                    break
            generation.num_drafted += len(drafts[row])
            generation.num_accepted += min(num_right, len(answer) - num_before)
            if ended:
                pool.free(seq_id)
                seq_ids[row] = -1
                continue
            pool.truncate(seq_id, kv_lens[row] - (picked.shape[1] - 1 - num_right))
            drafts[row] = drafters[row].propose(min(options.num_drafts, options.max_tokens - len(answer) - 1))
            # Where there are fewer drafts, the rest is written too, and dropped.
            newest[row] = [answer[-1], *drafts[row], *[0] * (options.num_drafts - len(drafts[row]))]
        pool.append_batch(seq_ids, num_tokens=q_len)

    started = time.perf_counter()
    first_tokens, cache = run_prefill(*prefill_args)
    picked = np.asarray(first_tokens)[:, None]
    generation.prefill_time = time.perf_counter() - started
    take(picked, prompt_lens)

    started = time.perf_counter()
    while (kv_lens := pool.kv_lens(seq_ids)).any():
        generation.num_steps += 1
        step = np.int32(generation.num_steps)
        next_tokens, cache = run_decode(params, cache, newest, block_tables(), kv_lens, step)
        take(np.asarray(next_tokens), kv_lens)
    generation.decode_time = time.perf_counter() - started
    generation.peak_pages = pool.stats().peak_used_pages
    return generation


def matmul_precision(dtype: jax.typing.DTypeLike) -> contextlib.AbstractContextManager[None]:
    """Keep float32 matrix products in float32, while tracing within: a GPU would round to TF32."""
    return jax.default_matmul_precision("highest" if np.dtype(dtype) == np.float32 else "default")
