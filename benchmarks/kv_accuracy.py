"""Measure what a narrower cache costs in accuracy: ``python -m benchmarks.kv_accuracy``.

The demo's model, SmolLM2-135M with float32 weights, reads the same tokens through caches of each dtype and
kind of scale, by `append_paged_kv` and `paged_attention`, and its logits are held against those of a float32
cache. A token is a row of its own that shares its sequence's pages, so that one pass over a text gives what
decoding it token by token would give. ``--dry-run`` walks the same path with a tiny random model and writes
nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import math
import platform
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.session import add_output_options, current_device
from jax_paged_attn import PageTable, append_paged_kv, kv_scale, slot_mapping
from jax_paged_attn.demo import model
from jax_paged_attn.demo.errors import DemoError
from jax_paged_attn.demo.generate import Options, generate, matmul_precision
from jax_paged_attn.demo.model import KVCache, LlamaConfig, Params
from jax_paged_attn.validation import QUANTIZED_DTYPES

PAGE_SIZE = 16
WINDOW = 512  # tokens of a window of the text; each pass takes as many
NUM_WINDOWS = 4
MAX_ANSWER = 64  # tokens
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "What is the capital of France, and what is it known for?",
    "Give me three tips for a good night's sleep.",
    "Write a short story about a lighthouse keeper and a lost ship.",
    "How do I sort a list of numbers in Python?",
    "What is the difference between a virus and a bacterium?",
    "Translate 'good morning, my friend' into French and Spanish.",
    "Describe how bread is made, step by step.",
)
# Topics of Python's own `help()`, which comes with every Python.
TEXT, CALIBRATION = "execmodel", "calls"

NOTES = """\
- **logit error**: the root mean square and the largest difference from the logits of a float32 cache, over
  all tokens of the text and the whole vocabulary.
- **perplexity**: of the text, each window by itself.
- **tokens changed**: of the answers that a float32 cache gives to {num_prompts} prompts, greedily, the tokens
  that this cache would have picked otherwise, each after the same tokens; **answers kept**: those with none
  such, which come out whole.
- **scale**: 1 is none. One for each layer's keys and one for its values (tensor), or one for each of their
  heads (head), is fixed before, by other text, as a server does it: larger values saturate. Or one for each
  head of each token (token).
- **bytes a token**: in all layers, scales of tokens included.
- Every token, of a prompt too, attends to what the cache gives back. Queries are float32, but for the
  bfloat16 cache, whose queries and results are bfloat16: their rounding counts too."""


@dataclasses.dataclass(frozen=True)
class Cache:
    """A kind of cache.

    Attributes
    ----------
    dtype : str
        Of keys and values.
    scale : str or None
        "1", "tensor", "head" or "token"; None if it isn't quantized.
    """

    dtype: str
    scale: str | None = None

    def token_bytes(self, config: LlamaConfig) -> int:
        """Count the bytes of a token in all layers.

        Examples
        --------
        >>> caches = Cache("bfloat16"), Cache("int8", "head"), Cache("int8", "token")
        >>> [cache.token_bytes(TINY) for cache in caches]
        [256, 128, 160]
        """
        head = config.head_dim * jnp.dtype(self.dtype).itemsize + 4 * (self.scale == "token")
        return 2 * config.num_layers * config.num_kv_heads * head


EXACT = Cache("float32")
CACHES = (
    EXACT,
    Cache("bfloat16"),
    *(Cache(dtype, scale) for dtype in QUANTIZED_DTYPES for scale in ("1", "tensor", "head", "token")),
)


class Passage(NamedTuple):
    """Token ids, and for each the one that should follow, or -1 where that doesn't count."""

    tokens: list[int]
    targets: list[int]


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes
    ----------
    params, config : Params, LlamaConfig
        The model.
    windows, prompts : list of list of int
        Token ids of the text and of what is asked.
    calibration : list of int
        Token ids of the text by which scales are fixed.
    stop_ids : frozenset of int
        What ends an answer.
    max_answer : int
        Tokens in an answer.
    notes : list of str
        For the head of the page of results.
    """

    params: Params
    config: LlamaConfig
    windows: list[list[int]]
    prompts: list[list[int]]
    calibration: list[int]
    stop_ids: frozenset[int]
    max_answer: int
    notes: list[str]


class Packed(NamedTuple):
    """Passages one after the other, on pages of their own: arrays ``[tokens]``, and a row for each token.

    `passages` says which passage a token belongs to; -1 is none.
    """

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    passages: np.ndarray
    page_table: PageTable
    slots: jax.Array


class Measures(NamedTuple):
    """Of each token's logits: mean square and largest error, loss of its target, the greedy choice."""

    square: Any
    largest: Any
    loss: Any
    choice: Any


def num_slots(passage: Passage) -> int:
    """Slots of the pages that hold a passage."""
    return -(-len(passage.tokens) // PAGE_SIZE) * PAGE_SIZE


def grouped(passages: Sequence[Passage], size: int) -> list[list[Passage]]:
    """Divide passages into groups that fit into `size` slots each.

    Examples
    --------
    >>> passages = [Passage([1] * n, [-1] * n) for n in (17, 3, 16)]
    >>> [len(group) for group in grouped(passages, size=48)]
    [2, 1]
    """
    groups: list[list[Passage]] = []
    room = 0
    for passage in passages:
        if num_slots(passage) > room:
            groups.append([])
            room = size
        groups[-1].append(passage)
        room -= num_slots(passage)
    return groups


def pack(passages: Sequence[Passage], size: int, seed: int) -> Packed:
    """Pack passages that fit into `size` slots, on pages in random order.

    Examples
    --------
    >>> packed = pack([Passage([5, 6, 7], [6, 7, -1]), Passage([8], [9])], size=32, seed=0)
    >>> some = np.array([0, 1, 2, 3, 16])
    >>> packed.tokens[some].tolist(), packed.targets[some].tolist(), packed.passages[some].tolist()
    ([5, 6, 7, 0, 8], [6, 7, -1, -1, 9], [0, 0, 0, -1, 1])
    >>> packed.page_table.kv_lens[some].tolist()
    [1, 2, 3, 0, 1]
    """
    tokens, positions, kv_lens, row_starts, row_pages = np.zeros((5, size), np.int32)
    targets, owners = np.full((2, size), -1, np.int32)
    first = 0
    for owner, passage in enumerate(passages):
        here = slice(first, first + len(passage.tokens))
        tokens[here], targets[here] = passage
        positions[here] = np.arange(len(passage.tokens))
        kv_lens[here] = positions[here] + 1
        owners[here], row_starts[here] = owner, first // PAGE_SIZE
        row_pages[here] = num_slots(passage) // PAGE_SIZE
        first += num_slots(passage)
    indices = np.random.default_rng(seed).permutation(size // PAGE_SIZE).astype(np.int32)
    page_table = PageTable(*map(jnp.asarray, (indices, row_starts, row_pages, kv_lens)))
    slots = slot_mapping(page_table, np.arange(size), positions, page_size=PAGE_SIZE)
    return Packed(tokens, positions, targets, owners, page_table, slots)


def read_through(
    params: Params,
    packed: Packed,
    scales: tuple[jax.Array, ...] | None,
    *,
    config: LlamaConfig,
    cache: Cache,
) -> jax.Array:
    """Compute the logits ``[tokens, vocab_size]`` of tokens that attend through a cache.

    Parameters
    ----------
    params, config
        The model.
    packed : Packed
        The tokens.
    scales : tuple of jax.Array, or None
        Of keys and of values, with an axis of layers; None where tokens bring their own, or there are none.
    cache : Cache
        The kind of cache.

    Returns
    -------
    float32[tokens, vocab_size]
    """
    one_layer = dataclasses.replace(config, num_layers=1)
    num_pages = packed.page_table.indices.shape[0]

    def attend(state, layer, q, k, v):
        # No layer needs another's pages, as each is read once, after all tokens are written.
        pools = model.empty_cache(one_layer, num_pages, PAGE_SIZE, cache.dtype)
        pools = jax.tree.map(lambda pages: pages[0], pools)
        if scales is None:
            pools = model.write(pools, k, v, packed.slots, None)
        else:
            k_scale, v_scale = (scale[layer] for scale in scales)
            k_pages, v_pages = append_paged_kv(
                pools.k, pools.v, k, v, packed.slots, k_scale=k_scale, v_scale=v_scale
            )
            pools = KVCache(k_pages, v_pages, k_scale, v_scale)
        return model.read(pools, q, packed.page_table, None), state

    tokens, positions = jnp.asarray(packed.tokens), jnp.asarray(packed.positions)
    x, _ = model.run_layers(params, config, tokens, positions, (), attend)
    return model.logits(params, config, x)


def keys_and_values(params: Params, tokens: jax.Array, *, config: LlamaConfig) -> tuple[jax.Array, jax.Array]:
    """Collect the keys and the values of tokens, each ``[num_layers, tokens, num_kv_heads, head_dim]``."""
    num_tokens = tokens.shape[0]
    shape = (config.num_layers, num_tokens, config.num_kv_heads, config.head_dim)

    def attend(found, layer, q, k, v):
        found = tuple(each.at[layer].set(new) for each, new in zip(found, (k, v), strict=True))
        return model.causal_attention(q[None], k[None], v[None])[0], found

    positions = jnp.arange(num_tokens, dtype=jnp.int32)
    found = (jnp.zeros(shape), jnp.zeros(shape))
    return model.run_layers(params, config, tokens, positions, found, attend)[1]


def fixed_scales(subject: Subject) -> dict[Cache, tuple[jax.Array, ...]]:
    """Find the scales of the caches whose scales don't come with the tokens."""
    collect = jax.jit(functools.partial(keys_and_values, config=subject.config))
    found = collect(subject.params, np.array(subject.calibration, np.int32))
    scales = {}
    for cache in CACHES:
        if cache.scale == "1":
            scales[cache] = (jnp.ones(subject.config.num_layers),) * 2
        elif cache.scale in ("tensor", "head"):
            of_layer = functools.partial(kv_scale, dtype=cache.dtype, granularity=cache.scale)
            scales[cache] = tuple(jax.vmap(of_layer)(each) for each in found)
    return scales


@jax.jit
def compare(logits: jax.Array, exact: jax.Array, targets: jax.Array) -> Measures:
    """Measure logits ``[tokens, vocab_size]`` against exact ones; the loss of a target of -1 says nothing."""
    error = logits - exact
    of_target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    return Measures(
        jnp.mean(error * error, axis=1),
        jnp.max(jnp.abs(error), axis=1),
        jax.nn.logsumexp(logits, axis=1) - of_target,
        jnp.argmax(logits, axis=1),
    )


def answer(subject: Subject) -> list[Passage]:
    """Let a float32 cache answer: prompts and answers, of which the answers' tokens count."""
    generation = generate(
        subject.params,
        subject.config,
        subject.prompts,
        Options(subject.max_answer, PAGE_SIZE, model.Sampling(), None),
        stop_ids=subject.stop_ids,
        on_token=lambda row, token: None,
    )
    return [
        Passage([*prompt, *tokens[:-1]], [-1] * (len(prompt) - 1) + tokens)
        for prompt, tokens in zip(subject.prompts, generation.answers, strict=True)
    ]


@dataclasses.dataclass
class Totals:
    """What was measured of one cache, token by token; `changed` is by answer."""

    squares: list[float] = dataclasses.field(default_factory=list)
    largest: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    changed: list[int] = dataclasses.field(default_factory=list)
    num_answered: int = 0

    def add_text(self, packed: Packed, measures: Measures) -> None:
        there, counts = packed.passages >= 0, packed.targets >= 0
        self.squares += measures.square[there].tolist()
        self.largest += measures.largest[there].tolist()
        self.losses += measures.loss[counts].tolist()

    def add_answers(self, packed: Packed, measures: Measures) -> None:
        counts = packed.targets >= 0
        wrong = counts & (measures.choice != packed.targets)
        owners = range(packed.passages.max() + 1)
        self.changed += [int(wrong[packed.passages == owner].sum()) for owner in owners]
        self.num_answered += int(counts.sum())

    def cells(self, exact: Totals) -> list[str]:
        """Lay out the measured part of a row of the table."""
        perplexity, exactly = (math.exp(np.mean(totals.losses)) for totals in (self, exact))
        return [
            f"{math.sqrt(np.mean(self.squares)):.4f}",
            f"{max(self.largest):.3f}",
            f"{perplexity:.4f}",
            f"{perplexity / exactly - 1:+.2%}",
            f"{sum(self.changed)} of {self.num_answered}",
            f"{self.changed.count(0)} of {len(self.changed)}",
        ]


def measure(subject: Subject) -> dict[Cache, Totals]:
    """Read the text and the answers through every cache."""
    size = max(map(len, subject.windows))
    texts = [Passage(window, [*window[1:], -1]) for window in subject.windows]
    answers = answer(subject)
    scales = fixed_scales(subject)
    calls = {
        cache: jax.jit(functools.partial(read_through, config=subject.config, cache=cache))
        for cache in CACHES
    }
    totals = {cache: Totals() for cache in CACHES}
    groups = [(group, Totals.add_text) for group in grouped(texts, size)]
    groups += [(group, Totals.add_answers) for group in grouped(answers, size)]
    for number, (group, add) in enumerate(groups, start=1):
        packed = pack(group, size, seed=number)
        exact = calls[EXACT](subject.params, packed, None)
        for cache, call in calls.items():
            logits = call(subject.params, packed, scales.get(cache))
            add(totals[cache], packed, jax.tree.map(np.asarray, compare(logits, exact, packed.targets)))
        print(f"pass {number} of {len(groups)} through {len(CACHES)} caches", flush=True)
    return totals


def table(config: LlamaConfig, totals: dict[Cache, Totals]) -> str:
    """Lay out what was measured as Markdown."""
    header = ["cache", "scale", "bytes a token", "logit error, rms", "largest"]
    header += ["perplexity", "against float32", "tokens changed", "answers kept"]
    rows = [
        [cache.dtype, cache.scale or "", f"{cache.token_bytes(config)}", *of_cache.cells(totals[EXACT])]
        for cache, of_cache in totals.items()
    ]
    return report.markdown_table(header, rows)


def smollm2() -> Subject:
    """Load the demo's model and the texts.

    Raises
    ------
    DemoError
        If a package of the demo is missing.
    """
    try:
        from jax_paged_attn.demo.gguf_file import (
            SMOLLM2_PACKAGE,
            GGUFFile,
            find_smollm2,
            read_config,
            read_params,
        )
        from jax_paged_attn.demo.tokenizer import ChatTokenizer
    except ImportError as error:
        raise DemoError(f"this needs the demo's packages: {error}") from error
    from pydoc_data.topics import topics

    path = find_smollm2()
    file = GGUFFile(path)
    config = read_config(file)
    params = read_params(file, config, np.dtype(np.float32), lambda num_bytes: None)
    tokenizer = ChatTokenizer(file)
    text, calibration = (tokenizer.encode(topics[topic]) for topic in (TEXT, CALIBRATION))
    starts = range(0, NUM_WINDOWS * WINDOW, WINDOW)

    def name_topic(topic):
        digest = hashlib.sha256(topics[topic].encode()).hexdigest()
        return f"`pydoc_data.topics.topics[{topic!r}]` of Python {platform.python_version()}, sha256 {digest}"

    return Subject(
        params,
        config,
        windows=[text[start : start + WINDOW] for start in starts],
        prompts=[tokenizer.encode_prompt(prompt) for prompt in PROMPTS],
        calibration=calibration[:WINDOW],
        stop_ids=tokenizer.stop_ids,
        max_answer=MAX_ANSWER,
        notes=[
            f"- model: {path.name} of {SMOLLM2_PACKAGE}, all weights and activations in float32",
            f"- text: the first {NUM_WINDOWS * WINDOW} tokens, in windows of {WINDOW}, of",
            f"  {name_topic(TEXT)}",
            f"- text that fixes scales: the first {WINDOW} tokens of",
            f"  {name_topic(CALIBRATION)}",
        ],
    )


TINY = LlamaConfig(
    num_layers=2,
    hidden_size=32,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=64,
    context_length=64,
    rms_norm_eps=1e-5,
)


def tiny() -> Subject:
    """Make a tiny model of random weights, and random texts."""
    rng = np.random.default_rng(0)
    config, ffn_size = TINY, 48

    def matrix(*shape):
        return jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, jnp.float32)

    def tokens(n):
        return rng.integers(config.vocab_size, size=n).tolist()

    n, hidden = config.num_layers, config.hidden_size
    q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = model.Layers(
        attn_norm=jnp.ones((n, hidden)),
        attn_q=matrix(n, q_size, hidden),
        attn_k=matrix(n, kv_size, hidden),
        attn_v=matrix(n, kv_size, hidden),
        attn_output=matrix(n, hidden, q_size),
        ffn_norm=jnp.ones((n, hidden)),
        ffn_gate=matrix(n, ffn_size, hidden),
        ffn_up=matrix(n, ffn_size, hidden),
        ffn_down=matrix(n, hidden, ffn_size),
    )
    embd = matrix(config.vocab_size, hidden)
    inv_freq = jnp.asarray(100.0 ** (-np.arange(8) / 8), jnp.float32)
    return Subject(
        Params(embd, layers, jnp.ones(hidden), embd, inv_freq),
        config,
        windows=[tokens(48), tokens(40)],
        prompts=[tokens(5), tokens(9), tokens(20)],
        calibration=tokens(32),
        stop_ids=frozenset(),
        max_answer=6,
        notes=["- model: tiny, random"],
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; see ``--help``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kv_accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_output_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the page; 0 if the float32 cache repeats its answers, 2 without a model."""
    arguments = parse_arguments(argv)
    try:
        subject = tiny() if arguments.dry_run else smollm2()
    except DemoError as error:
        print(error, file=sys.stderr)
        return 2
    commit = report.commit()  # before the tree can change
    with matmul_precision(np.float32):
        totals = measure(subject)

    device = current_device()
    kind = "CPU" if device.platform == "cpu" else device.device_kind
    versions = report.installed("jax", "jaxlib", "numpy", "gguf", "tokenizers")
    head = [
        report.head("python -m benchmarks.kv_accuracy", commit, versions),
        *subject.notes,
        NOTES.format(num_prompts=len(subject.prompts)),
    ]
    title = f"# Accuracy of narrower caches, {kind}"
    page = "\n\n".join([title, "\n".join(head), table(subject.config, totals)])
    print(f"\n{page}")
    if arguments.dry_run:
        print("\ndry run: a tiny random model, nothing is written")
    else:
        (arguments.out / "kv_accuracy.md").write_text(f"{page}\n")
    if sum(totals[EXACT].changed):
        print("a pass of the float32 cache changes its own answers", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
