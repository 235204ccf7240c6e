"""What a region writes into containers that it is given is in the caller's, with its gradient."""

from collections import OrderedDict, defaultdict, deque

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same
from right import X

import functx


def both(program, *leaves):
    """Results of ``program(remat, x, *leaves)`` and their gradients, with remat and without."""
    found = []
    for remat in (identity, functx.remat):
        given = [t.detach().clone().requires_grad_() for t in (X, *leaves)]
        outs = program(remat, *given)
        gradients = torch.autograd.grad(sum(t.cos().sum() for t in outs), given)
        found.append((outs, gradients))
    assert_same(found[1][0], found[0][0])
    assert_same(found[1][1], found[0][1], 8.0)


class TestTensorsLeaveInThem:
    """They become further results."""

    @pytest.mark.parametrize("nested", [False, True])
    def test_an_empty_list(self, nested):
        def layer(x, aux):
            h = x.sin()
            aux.append(h.square().sum())
            return h.cos()

        def program(remat, x):
            inner = remat(layer)
            call = remat(lambda x, aux: inner(x, aux)) if nested else inner
            aux = []
            y = call(call(x, aux), aux)
            assert len(aux) == 2
            return [y, *aux]

        both(program)

    def test_a_list_with_tensors(self):
        def program(remat, x, w):
            def layer(x, aux):
                aux[0] = aux[0] * x
                aux.append(aux[0].exp())
                return x.sin()

            aux = [w]
            y = remat(layer)(x, aux)
            return [y, *aux]

        both(program, X + 1)

    def test_dicts_in_dicts_and_lists(self):
        def program(remat, x, w):
            def layer(x, state, *, log):
                state["layers"]["h"] = x * state["w"]
                state["old"] = state.pop("w")
                state["given"] = (x, state["layers"])
                log.append(state["layers"]["h"].sin())
                return x.cos()

            state, log = OrderedDict(w=w, layers={}), deque([w], maxlen=1)
            y = remat(layer)(x, state, log=log)
            assert [*state] == ["layers", "old", "given"]
            assert state["old"] is w
            assert state["given"][0] is x
            assert state["given"][1] is state["layers"]
            return [y, state["layers"]["h"], log[0]]

        both(program, X + 1)

    def test_what_is_made_when_it_is_asked_for(self):
        def program(remat, x):
            found = defaultdict(list)

            def layer(x, found):
                found["h"].append(x.sin())
                return x.cos()

            y = remat(layer)(x, found)
            assert found["more"] == []
            return [y, *found["h"]]

        both(program)

    @pytest.mark.parametrize("start", [[], [1.0]])
    def test_one_that_is_given_twice(self, start):
        def program(remat, x):
            def layer(x, a, b):
                a.append(x.sin())
                assert a is b
                return b[-1].cos()

            a = [x.exp() for _ in start]
            y = remat(layer)(x, a, a)
            return [y, *a]

        both(program)

    def test_under_transforms(self):
        def loss(remat):
            def f(x):
                aux = {"sum": x * 2}

                def layer(x, aux):
                    aux["sum"] = aux["sum"] * x.sin()
                    return x.cos()

                y = remat(layer)(x, aux)
                return (y * aux["sum"]).sum()

            return f

        for transform in (functx.grad, lambda f: functx.vmap(functx.grad(f))):
            xs = numbers(3, 4)
            assert_same(transform(loss(functx.remat))(xs), transform(loss(identity))(xs), 8.0)


class TestWhatIsNoTensor:
    """It is counted once."""

    def test_counters(self):
        def layer(x, state, seen):
            state["n"] = state.get("n", 0) + 1
            seen.append(state["n"])
            return (x * state["n"]).sin()

        def program(remat, x):
            state, seen = {}, []
            y = remat(layer)(x, state, seen)
            y = remat(layer)(y, state, seen)
            y.sum().backward(retain_graph=True)
            x.grad = None
            assert (state, seen) == ({"n": 2}, [1, 2])
            return [y]

        both(program)

    def test_what_was_written_before_an_error(self):
        def layer(x, state):
            state["w"] = 1
            raise KeyError("mine")

        x = X.clone().requires_grad_()
        state = {"x": x}
        with pytest.raises(KeyError, match="mine"):
            functx.remat(layer)(x, state)
        assert state == {"x": x, "w": 1}

    def test_what_is_not_written_to_stays_as_it_is(self):
        x = X.clone().requires_grad_()
        tree = {"a": [x, x], "b": (1, {"c": x})}
        functx.remat(lambda tree: tree["a"][0] * tree["b"][1]["c"])(tree)
        assert all(t is x for t in (*tree["a"], tree["b"][1]["c"]))

    def test_a_budget_refuses(self):
        def layer(x, aux):
            aux.append(x.sin())
            return x.cos()

        with pytest.raises(functx.RematError, match="changes a list or a dict"):
            functx.remat(layer, budget=1.0)(X.clone().requires_grad_(), [])
