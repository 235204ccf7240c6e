"""The house's own rules, its pages, its programs; and ``bench``, which is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
