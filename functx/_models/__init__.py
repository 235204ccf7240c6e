"""Regions in existing models, without changing their code.

- `apply`: `apply_remat` makes submodules regions, `remove_remat` undoes it.
- `select`: finds submodules by class, name or pattern.
- `checkpoint`: drop-in replacements for the functions of `torch.utils.checkpoint`.
- `patch`: `patch_checkpoint` lets calls of `torch.utils.checkpoint` use functx.
"""

from functx._models.apply import apply_remat as apply_remat
from functx._models.apply import remat_regions as remat_regions
from functx._models.apply import remove_remat as remove_remat
from functx._models.checkpoint import checkpoint as checkpoint
from functx._models.checkpoint import checkpoint_sequential as checkpoint_sequential
from functx._models.patch import patch_checkpoint as patch_checkpoint
from functx._models.select import Where as Where
from functx._models.select import find as find
