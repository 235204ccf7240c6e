"""Pass arrays, dtypes, containers, modules and settings from one framework to the other."""

import jax

from functx._core import add_internal
from functx.compat._bridge.dlpack import array_from_torch as array_from_torch
from functx.compat._bridge.dlpack import borrow as borrow
from functx.compat._bridge.dlpack import decoder as decoder
from functx.compat._bridge.dlpack import encode as encode
from functx.compat._bridge.dlpack import give as give
from functx.compat._bridge.dlpack import is_key as is_key
from functx.compat._bridge.dlpack import tensor_from_jax as tensor_from_jax
from functx.compat._bridge.dtypes import ENABLE_X64 as ENABLE_X64
from functx.compat._bridge.dtypes import WIDE_FLOATS as WIDE_FLOATS
from functx.compat._bridge.dtypes import WIDE_INTEGERS as WIDE_INTEGERS
from functx.compat._bridge.dtypes import check_fits as check_fits
from functx.compat._bridge.dtypes import has_torch_dtype as has_torch_dtype
from functx.compat._bridge.dtypes import to_jax_dtype as to_jax_dtype
from functx.compat._bridge.dtypes import to_torch_dtype as to_torch_dtype
from functx.compat._bridge.dtypes import torch_dtype_of as torch_dtype_of
from functx.compat._bridge.jax_settings import Settings as Settings
from functx.compat._bridge.jax_settings import current_settings as current_settings
from functx.compat._bridge.jax_settings import restored as restored
from functx.compat._bridge.modules import as_module as as_module
from functx.compat._bridge.modules import function_of as function_of
from functx.compat._bridge.modules import function_with_buffers as function_with_buffers
from functx.compat._bridge.modules import state_of as state_of
from functx.compat._bridge.trees import endless_refused as endless_refused
from functx.compat._bridge.trees import teach_jax as teach_jax

add_internal(jax.__file__)
