"""The page about torch's own faults says which derivatives of linear algebra are wrong."""

import json

import pytest
import torch

from tools.derivatives import third_order

# torch has no batching rule for LU, and runs examples one by one.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
TABLE = json.loads(third_order.TABLE.read_text())
DEFINITIONS = [(name, by) for name, found in third_order.INSTEAD.items() for by in found]


def test_the_page_is_made_of_the_table_and_the_table_of_the_present_operators():
    assert third_order.section(TABLE) in third_order.PAGE.read_text()
    assert [*TABLE["operators"]] == [*third_order.OPERATORS]
    named = {name: [*found] for name, found in TABLE["instead"].items()}
    assert named == {name: [*found] for name, found in third_order.INSTEAD.items()}


@pytest.mark.parametrize(("name", "by"), DEFINITIONS)
def test_a_definition_by_other_operators_is_right_in_all_orders(name, by):
    f = third_order.INSTEAD[name][by]
    torch.testing.assert_close(f(third_order.POINT), third_order.OPERATORS[name](third_order.POINT))
    assert third_order.wrong(f, 3) == {}


@pytest.mark.skipif(
    not torch.__version__.startswith(TABLE["torch"]),
    reason="the page says what is wrong in the version of torch that is pinned",
)
@pytest.mark.parametrize("name", ["det", "slogdet", "solve", "inv"])
def test_what_the_page_calls_wrong_is_wrong(name):
    found = third_order.wrong(third_order.OPERATORS[name], 3)
    assert found.keys() == TABLE["operators"][name]["3"].keys()


@pytest.mark.sweep
def test_torch_is_swept_to_third_order():
    of = third_order.sweep()
    third_order.write(of)
    assert not any(
        any(orders.values()) for found in of["instead"].values() for orders in found.values()
    )
