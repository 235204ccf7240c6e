"""The recompute engine (rewritten below)."""
from functx._remat.api import remat as remat
from functx._remat.names import checkpoint_name as checkpoint_name
