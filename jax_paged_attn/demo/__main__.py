"""Entry point of ``python -m jax_paged_attn.demo``."""

import sys

from jax_paged_attn.demo.cli import main

if __name__ == "__main__":
    sys.exit(main())
