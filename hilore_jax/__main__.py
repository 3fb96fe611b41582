"""`python -m hilore_jax`: the `hilore` command."""

import sys

from hilore_jax.cli import main

sys.exit(main())
