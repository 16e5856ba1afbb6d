"""Command line of the demo: options, their checks, and how each failure ends."""

import argparse
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from jax_paged_attn.demo.errors import DemoError
from jax_paged_attn.dispatch import IMPLEMENTATIONS

DTYPES = ("float32", "bfloat16", "float16")
PACKAGES = ("gguf", "tokenizers", "jinja2")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status: 0, 1 for an error, 2 for wrong options, 130 for Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        _require_packages()
        # Imported here so that `--help` and wrong options need none of the packages.
        from jax_paged_attn.demo.run import run

        run(args)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the demo's options."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_paged_attn.demo",
        description="Generate text with a Llama model whose KV cache is paged. The default is SmolLM2-135M.",
    )
    add = parser.add_argument
    add("--gguf", type=Path, metavar="PATH", help="a GGUF file of the llama architecture (default: SmolLM2)")
    add("--prompt", action="append", metavar="TEXT", help="may be repeated: all prompts run as one batch")
    add("--max-tokens", type=_positive_int, default=64, metavar="N", help="tokens per answer (default: 64)")
    add("--page-size", type=_positive_int, default=16, metavar="N", help="tokens per page (default: 16)")
    add(
        "--implementation",
        choices=[implementation.name for implementation in IMPLEMENTATIONS],
        help="of paged_attention (default: the first that can run here)",
    )
    add("--dtype", choices=DTYPES, help="of weights and cache (default: bfloat16 on a GPU, else float32)")
    add("--temperature", type=_temperature, default=0.0, metavar="T", help="0, the default, is greedy")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of sampling and page order (default: 0)",
    )
    add(
        "--check",
        action="store_true",
        help="replay the answers with a dense, unpaged cache and fail unless it picks the same tokens",
    )
    return parser


def _require_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f'the demo needs {", ".join(missing)}: pip install "jax_paged_attn[demo]"')


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number of at least 0, got {text!r}")
    return value
