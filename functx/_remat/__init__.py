"""The recompute engine (docstring: below, with the rules)."""

from functx._remat.api import checked_options as checked_options
from functx._remat.api import name_of as name_of
from functx._remat.api import remat as remat
from functx._remat.call import differentiating as differentiating
from functx._remat.call import on_budget as on_budget
from functx._remat.call import run as run
from functx._remat.calls import listening as listening
from functx._remat.inside import by_arguments as by_arguments
from functx._remat.inside import by_primals as by_primals
from functx._remat.inside import made_inside as made_inside
from functx._remat.inside import taken_in as taken_in
from functx._remat.levels import is_tracked as is_tracked
from functx._remat.module import RematModule as RematModule
from functx._remat.names import checkpoint_name as checkpoint_name
from functx._remat.observers import no_regions as no_regions
from functx._remat.observers import on_name as on_name
from functx._remat.observers import on_region as on_region
from functx._remat.observers import on_replay as on_replay
from functx._remat.region import Options as Options
from functx._remat.settings import Settings as Settings
from functx._remat.traced import batch_being_traced as batch_being_traced
from functx._remat.traced import keep_regions as keep_regions
from functx._remat.traced import unseen as unseen
