"""Helpers that every other folder uses: pytrees, checks of arguments, errors, lines of user code.

- `tree`: pytrees.
- `validate`: checks of arguments, with the messages that users see.
- `errors`: `RematError`, `ReplayError`, `TracingError`, `LoweringError`.
- `source_location`: the line of the user's code that is running.
- `objects`: reads containers and objects of users without running their code.
- `closures`: lists the variables that a function's code reads by name.
- `backend_dispatch`: sends calls with JAX arrays to JAX, and calls with torch tensors to functx.
- `memory_tracker`: follows each storage from the operation that made it to its death.
- `norm_derivatives`: derivatives of normalisations that torch gets wrong where they nest.
- `linear_maps`: marks tapes that `functx.linearize` records only to transpose them twice.
- `ended_levels`: unwraps tensors that outlive the level of a transform.
- `compiler_warnings`: runs functions in eager under ``torch.compile``, and warns about it.
"""

from functx._core import memory_tracker as memory_tracker
from functx._core import norm_derivatives as norm_derivatives
from functx._core import tree as tree
from functx._core import validate as validate
from functx._core.backend_dispatch import backend_of as backend_of
from functx._core.backend_dispatch import dispatches_on_arguments as dispatches_on_arguments
from functx._core.backend_dispatch import dispatches_on_primals as dispatches_on_primals
from functx._core.closures import PLAIN as PLAIN
from functx._core.closures import variables as variables
from functx._core.compiler_warnings import exporting as exporting
from functx._core.compiler_warnings import tell as tell
from functx._core.compiler_warnings import told as told
from functx._core.compiler_warnings import uncompiled as uncompiled
from functx._core.ended_levels import function_classes as function_classes
from functx._core.ended_levels import unwrap_for_backward as unwrap_for_backward
from functx._core.errors import LoweringError as LoweringError
from functx._core.errors import RematError as RematError
from functx._core.errors import ReplayError as ReplayError
from functx._core.errors import TracingError as TracingError
from functx._core.linear_maps import is_only_transposed as is_only_transposed
from functx._core.linear_maps import only_transposed as only_transposed
from functx._core.memory_tracker import Event as Event
from functx._core.memory_tracker import Held as Held
from functx._core.memory_tracker import LiveStorages as LiveStorages
from functx._core.memory_tracker import cuda_devices as cuda_devices
from functx._core.memory_tracker import no_collection as no_collection
from functx._core.memory_tracker import operation_name as operation_name
from functx._core.memory_tracker import storages_of as storages_of
from functx._core.norm_derivatives import BY_DEFINITION as BY_DEFINITION
from functx._core.norm_derivatives import NORMALISATIONS as NORMALISATIONS
from functx._core.norm_derivatives import NormsByDefinition as NormsByDefinition
from functx._core.norm_derivatives import NormsInOneDtype as NormsInOneDtype
from functx._core.norm_derivatives import mixes_dtypes as mixes_dtypes
from functx._core.norm_derivatives import normalised as normalised
from functx._core.norm_derivatives import standing_in as standing_in
from functx._core.objects import attributes as attributes
from functx._core.objects import contents as contents
from functx._core.objects import is_of as is_of
from functx._core.source_location import add_internal as add_internal
from functx._core.source_location import is_internal as is_internal
from functx._core.source_location import line_now as line_now
from functx._core.source_location import line_of as line_of
from functx._core.source_location import module_of as module_of
from functx._core.source_location import users_line as users_line
from functx._core.source_location import where as where
from functx._core.tree import ENDLESS as ENDLESS
from functx._core.validate import Argnums as Argnums
from functx._core.validate import Randomness as Randomness
from functx._core.validate import check_callable as check_callable
from functx._core.validate import checked_budget as checked_budget
from functx._core.validate import describe as describe
from functx._core.validate import has_derivatives as has_derivatives
from functx._core.validate import has_forward as has_forward
from functx._core.validate import integer as integer
from functx._core.validate import name_of as name_of
from functx._core.validate import refuse_options as refuse_options
from functx._core.validate import warn_if_later as warn_if_later
