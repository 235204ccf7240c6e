"""Regions in models of other people.

- `apply`: `apply_remat` makes regions of submodules, `remove_remat` undoes it.
- `select`: finds submodules by class, name or pattern.
- `checkpoint`: drop-ins for `torch.utils.checkpoint`.
- `patch`: `patch_checkpoint`, under which calls of `torch.utils.checkpoint` become functx's.
"""

from functx._models.apply import apply_remat as apply_remat
from functx._models.apply import remat_regions as remat_regions
from functx._models.apply import remove_remat as remove_remat
from functx._models.checkpoint import checkpoint as checkpoint
from functx._models.checkpoint import checkpoint_sequential as checkpoint_sequential
from functx._models.patch import patch_checkpoint as patch_checkpoint
from functx._models.select import Where as Where
from functx._models.select import find as find
