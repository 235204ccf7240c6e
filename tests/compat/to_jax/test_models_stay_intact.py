"""A model that does something to itself is as it was when `to_jax` has refused it.

The kind is described in ``tests/acts_on_models.py``. ``to_jax`` of a function reads the model's own
parameters, and that of the module itself runs it on others.
"""

import jax
import jax.numpy as jnp
import pytest
from acts_on_models import ERRORS, FAILURES, NAMES, Acted, places, sets_all_data, sets_data
from cases import numbers
from references import assert_same

import functx
from functx._core.errors import LoweringError
from functx.compat import to_jax

X = numbers(4, 3)


def of_a_function(model):
    return to_jax(lambda x: model(x))(jnp.asarray(X.numpy()))


def of_a_region(model):
    return to_jax(functx.remat(lambda x: model(x)))(jnp.asarray(X.numpy()))


def of_the_module(model):
    params, fn = to_jax(model)
    return fn(params, jnp.asarray(X.numpy()))


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("run", [of_a_function, of_a_region])
@pytest.mark.parametrize("act", ERRORS, ids=NAMES)
def test_a_model_is_as_it_was_after_the_error(act, run):
    model = Acted(act)
    before, expected = places(model), Acted(lambda m: None)(X)
    with pytest.raises((LoweringError, functx.RematError)):  # the latter in a region
        run(model)
    assert places(model) == before
    model.act = lambda m: None
    assert_same(model(X), expected)


@pytest.mark.filterwarnings("ignore:the function writes to 1 of its arguments")
@pytest.mark.parametrize("act", [*ERRORS, *FAILURES], ids=[*NAMES, *map(str, range(len(FAILURES)))])
def test_a_module_is_as_it_was_after_it_ran_on_other_parameters(act):
    """Some of these acts are fine then: they are done to the parameters that are given."""
    model = Acted(act)
    before = places(model)
    try:
        found = of_the_module(model)
    except (LoweringError, RuntimeError, ZeroDivisionError, KeyboardInterrupt):
        pass
    else:
        assert found.shape == X.shape
    assert places(model) == before


@pytest.mark.parametrize("act", [sets_data, sets_all_data])
def test_given_parameters_do_not_get_other_data_silently(act):
    with pytest.raises(LoweringError, match=r"sets \.data of a tensor"):
        of_the_module(Acted(act))
