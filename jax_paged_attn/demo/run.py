"""One run of the demo: load, generate, check, report."""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_paged_attn.demo.check import check_answers
from jax_paged_attn.demo.cli import KV_DTYPES
from jax_paged_attn.demo.errors import DemoError
from jax_paged_attn.demo.generate import Generation, Options, generate
from jax_paged_attn.demo.gguf_file import GGUFFile, find_smollm2, read_config, read_params
from jax_paged_attn.demo.model import LlamaConfig, Params, Sampling
from jax_paged_attn.demo.terminal import Progress, answer_printer, format_table, printable
from jax_paged_attn.demo.tokenizer import ChatTokenizer

DEFAULT_PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "What is the capital of France, and what is it known for?",
    "Give me three tips for a good night's sleep. Keep each of them to a single short sentence, please.",
)


def run(args: argparse.Namespace) -> None:
    """Do what the options ask for; raises DemoError for what the user can put right."""
    texts = args.prompt or DEFAULT_PROMPTS
    # Half the bytes are twice the speed where there is bfloat16 arithmetic, which many CPUs lack.
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    options = Options(
        args.max_tokens,
        args.page_size,
        Sampling(args.temperature, args.seed),
        args.implementation,
        KV_DTYPES[args.kv_dtype] if args.kv_dtype else None,
        args.speculative,
    )

    name, config, params, tokenizer = _load(args.gguf or find_smollm2(), dtype)
    if args.window is not None:  # one of the whole context is as good as any larger one
        config = dataclasses.replace(config, window=min(args.window, config.context_length))
    prompts = [tokenizer.encode_prompt(text) for text in texts]
    _check_lengths(prompts, options, config)
    streams = [tokenizer.stream() for _ in prompts]
    with answer_printer(texts, sys.stdout) as printer:
        generation = generate(
            params,
            config,
            prompts,
            options,
            stop_ids=tokenizer.stop_ids,
            on_token=lambda row, token: printer.add(row, streams[row].add(token)),
        )
    table = [("model", f"{printable(name)}, {dtype}"), ("device", _device_name())]
    table += _measurements(generation, prompts, options)
    print(format_table(table), flush=True)
    if args.check:
        agreement = check_answers(
            params, config, prompts, generation.answers, options.sampling, generation.kv_dtype
        )
        print(f"\ncheck: {agreement}")


def _load(path: Path, dtype: str) -> tuple[str, LlamaConfig, Params, ChatTokenizer]:
    with Progress(f"loading {path.name}", sys.stderr) as progress:
        file = GGUFFile(path)
        config = read_config(file)
        tokenizer = ChatTokenizer(file)
        total = sum(int(tensor.n_bytes) for tensor in file.tensors.values())
        params = read_params(file, config, jnp.dtype(dtype), lambda amount: progress.add(amount, total))
    return file.name, config, params, tokenizer


def _check_lengths(prompts: list[list[int]], options: Options, config: LlamaConfig) -> None:
    if options.page_size > config.context_length:
        raise DemoError(
            f"--page-size {options.page_size} is more than the model's context of {config.context_length}"
        )
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise DemoError(f"prompt {number} has no tokens")
        if len(prompt) + options.max_tokens > config.context_length:
            raise DemoError(
                f"prompt {number} has {len(prompt)} tokens; with --max-tokens {options.max_tokens} that is "
                f"more than the model's context of {config.context_length}"
            )


def _measurements(
    generation: Generation, prompts: list[list[int]], options: Options
) -> list[tuple[str, str]]:
    chosen = generation.explanation
    reasons = [f"not {name}: {reason}" for name, reason in chosen.passed_over]
    peak, page_size = generation.peak_pages, options.page_size
    # The first token of each answer comes from prefill.
    num_decoded = sum(len(answer) - 1 for answer in generation.answers)
    rows = [
        ("implementation", "; ".join([chosen.implementation, *reasons])),
        ("cache", f"{generation.kv_dtype}, {generation.token_bytes} bytes a token in all layers"),
        ("pages a layer", f"{peak} of {generation.num_pages} used at most, {page_size} tokens each"),
        ("compile", f"{generation.compile_time:.1f} s"),
        ("prefill", _rate(sum(map(len, prompts)), generation.prefill_time)),
        ("decode", _rate(num_decoded, generation.decode_time)),
    ]
    if options.num_drafts:
        accepted, drafted = generation.num_accepted, generation.num_drafted
        plain = max(len(answer) - 1 for answer in generation.answers)
        share = f"{accepted} of {drafted} accepted ({accepted / max(drafted, 1):.0%})"
        rows.append(("drafts", f"{share}, {generation.num_steps} steps instead of {plain}"))
    return rows


def _rate(num_tokens: int, seconds: float) -> str:
    rate = num_tokens / seconds if num_tokens else 0.0
    return f"{rate:.1f} tokens/s ({num_tokens} tokens in {seconds:.2f} s)"


def _device_name() -> str:
    device = jax.devices()[0]
    return f"CPU, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
