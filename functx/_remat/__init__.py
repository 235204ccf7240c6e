"""The recompute engine: one idea a file."""

from functx._remat import _by_sight, _rules  # noqa: F401  register themselves
from functx._remat._api import remat as remat
from functx._remat._names import checkpoint_name as checkpoint_name
from functx._remat._observers import no_regions as no_regions
from functx._remat._observers import on_region as on_region
from functx._remat._observers import on_replay as on_replay
from functx._remat._rules.proxy import keep_regions as keep_regions
