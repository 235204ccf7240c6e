"""JAX runs on the CPU here, whatever the machine has."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
