"""Loops and chains that save a few of their states and recompute the rest.

- `loops`: `remat_scan`, `remat_loop`, `remat_sequential`.
- `while_loop`: loops whose number of steps depends on the data.
- `binomial`: computes where to cut a loop, so that it recomputes least with a number of slots.
"""

from functx._loops.binomial import segments as segments
from functx._loops.loops import checked_chain as checked_chain
from functx._loops.loops import composed as composed
from functx._loops.loops import remat_loop as remat_loop
from functx._loops.loops import remat_scan as remat_scan
from functx._loops.loops import remat_sequential as remat_sequential
