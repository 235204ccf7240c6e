"""`saved_residuals`: what is listed is what is kept, to the byte; its name, line and module."""

import inspect

import pytest
import torch
from cases import WEIGHTS, X, layers, named, numbers
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import functx
from functx import checkpoint_policies as cp
from functx import memory

pytestmark = pytest.mark.usefixtures("no_hooks")


sources = lambda residuals: [r.source for r in residuals]
line_of = lambda f, offset: f.__code__.co_firstlineno + offset


HERE = "cases.py"
LINE = f"at {HERE}:{line_of(layers, 2)} in layers"


def with_leaves(args):
    """The same arguments, so that plain autograd differentiates all of them."""
    leaves, spec = pytree.tree_flatten(args)
    return pytree.tree_unflatten([t.detach().clone().requires_grad_() for t in leaves], spec)


def checked(f, *args):
    """The residuals of ``f``, whose bytes are those of another counter."""
    args = with_leaves(args)
    residuals = functx.saved_residuals(f, *args)
    measured = memory.profile(f, *args)
    assert residuals.kept == measured.kept
    assert residuals.nbytes == sum(r.nbytes for r in residuals)
    return residuals


def nested(weights, x):
    def outer(weights, x):
        return torch.sin(functx.remat(layers, policy=cp.dots_saveable)(weights[:2], x) @ weights[2])

    return functx.remat(outer, policy=cp.save_only_these_names("none"))(weights, x)


def attention(q, k):
    scores = functx.checkpoint_name(q @ k.mT, "scores")
    return torch.softmax(scores, -1) @ k


def in_place(weights, x):
    h = torch.sin(x @ weights[0])
    y = h.exp()
    h.mul_(2)
    return y * h.cos()


def several(weights, x):
    q, k = (x @ torch.cat(weights[:2], 1)).chunk(2, dim=1)
    values, places = torch.sort(torch.sin(functx.checkpoint_name(q, "q")) * k)
    return values, places, [x, torch.tanh(values)]


PROGRAMS = {
    "layers": (layers, WEIGHTS, X),
    "nested": (nested, WEIGHTS, X),
    "attention": (attention, numbers(2, 6, 4), numbers(2, 6, 4, start=1.0)),
    "in place": (in_place, WEIGHTS, X),
    "several results": (several, WEIGHTS, X),
    "dropout": (lambda x: F.dropout(torch.tanh(x), 0.5), X),
    "jvp": (lambda x: functx.jvp(torch.sin, (torch.exp(x),), (x,))[1], X),
    "grad": (functx.grad(lambda x: torch.sin(x.exp()).sum()), X),
    "vmap(grad)": (functx.vmap(functx.grad(lambda x: torch.sin(x.exp()).sum())), X),
    "the argument": (lambda x: x, X),
    "a constant": (lambda x: x.new_ones(3), X),
}
POLICIES = {
    "no region": None,
    "nothing": cp.nothing_saveable,
    "dots": cp.dots_saveable,
    "everything": cp.everything_saveable,
    "names": cp.save_only_these_names("scores", "q"),
    "offloaded": cp.offload(cp.everything_saveable),
}


def pairs():
    """Each program as it is, as a region, and with two policies."""
    some = [*POLICIES][2:]
    for i, program in enumerate(PROGRAMS):
        yield from ((program, p) for p in ("no region", "nothing", some[i % 4], some[(i + 1) % 4]))


@pytest.mark.parametrize(("program", "policy"), [*pairs()])
def test_bytes_are_those_of_live_storages(program, policy):
    f, *args = PROGRAMS[program]
    region = f if policy == "no region" else functx.remat(f, policy=POLICIES[policy])
    checked(region, *args)
    leaves = with_leaves(tuple(args))
    batched = pytree.tree_map(lambda t: torch.stack([t, t + 1]), leaves)
    checked(functx.vmap(region, randomness="different"), *batched)


def test_jax_arrays_are_measured_by_jax(capsys):
    jax = pytest.importorskip("jax")
    from jax.ad_checkpoint import checkpoint_name

    f = lambda x: jax.numpy.sin(checkpoint_name(jax.numpy.sin(x), "a"))
    f = jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("a"))
    residuals = functx.saved_residuals(f, jax.numpy.ones(3))
    assert [r.nbytes for r in residuals] == [12, 12]
    assert residuals[0].source == "argument x"
    assert residuals[1].source.startswith("named 'a'")
    assert [r.kind for r in residuals] == ["argument", "named"]
    functx.print_saved_residuals(f, jax.numpy.ones(3))
    assert "named 'a'" in capsys.readouterr().out


class TestWhatItIsAskedOf:
    def test_only_what_requires_grad_if_anything_does(self):
        w = WEIGHTS[0].clone().requires_grad_()
        assert len(functx.saved_residuals(torch.matmul, X, w)) == 1
        assert len(functx.saved_residuals(torch.matmul, X, w.detach())) == 2

    def test_arguments_without_derivatives_may_be_kept(self):
        index = torch.tensor([0, 2])
        residuals = functx.saved_residuals(lambda x, i: x.sin()[i], X, index)
        assert sources(residuals) == ["argument x", "argument i"]
        assert functx.saved_residuals(lambda i: i + 1, index) == []
        assert functx.saved_residuals(lambda: None) == []

    def test_the_first_two_fields_are_those_of_jax(self):
        (kept,) = functx.saved_residuals(lambda x: torch.sin(x), X)
        value, source, *_ = kept
        assert (str(value), source) == ("float64[4,5]", "argument x")
        assert (kept.shape, kept.dtype) == (X.shape, X.dtype)

    @pytest.mark.parametrize("which", ["result", "hidden", "view", "cycle"])
    def test_a_tape_that_somebody_else_holds_too_is_listed(self, which):
        holder = []

        def f(x):
            hidden = torch.sin(torch.exp(x)) @ WEIGHTS[0]
            result = torch.cos(hidden.T).exp()
            if which == "cycle":
                own = [result, hidden]
                own.append(own)
            else:
                holder.append({"result": result, "hidden": hidden, "view": hidden.T}[which])
            return result

        x = X.clone().requires_grad_()
        expected = ["constant WEIGHTS[0]", "aten.exp", "aten.mm", "aten.exp"]
        found = functx.saved_residuals(f, x)
        assert [r.operation or r.source for r in found] == expected
        assert [r.operation or r.source for r in functx.saved_residuals(f, 2 * x)] == expected

    def test_inside_of_a_transform_it_is_an_error(self):
        def f(x):
            functx.saved_residuals(torch.sin, x)
            return x

        with pytest.raises(RuntimeError, match="Call it outside"):
            functx.vmap(f)(X)

    def test_what_is_no_function_is_an_error(self):
        for f in (functx.saved_residuals, functx.print_saved_residuals):
            with pytest.raises(TypeError, match="saved_residuals: expected a callable"):
                f(X)
        with pytest.raises(ZeroDivisionError):
            functx.saved_residuals(lambda x: 1 / 0, X)


class TestSources:
    def test_arguments_by_their_names(self):
        f = lambda params, *rest, scale, **more: params["w"] * rest[1][0] * scale * more["more"]
        x = [torch.ones(2) * i for i in range(1, 5)]
        residuals = functx.saved_residuals(f, {"w": x[0]}, 3, (x[1],), scale=x[2], more=x[3])
        assert sources(r for r in residuals if not r.made) == [
            "argument params['w']",
            "argument rest[1][0]",
            "argument scale",
            "argument more",
        ]
        assert all(r.kind == "argument" for r in residuals if not r.made)

    def test_operations_by_their_lines(self):
        made = [r for r in functx.saved_residuals(layers, WEIGHTS, X) if r.made]
        assert sources(made)[:2] == [f"output of aten.mm {LINE}", f"output of aten.sin {LINE}"]
        assert {(r.file, r.function) for r in made} == {(inspect.getfile(layers), "layers")}
        assert {r.line for r in made} == {line_of(layers, 2)}
        assert [r.operation for r in made] == ["aten.mm", "aten.sin"] * 2 + ["aten.mm"]

    @pytest.mark.parametrize("remat", [False, True])
    def test_names_come_first(self, remat):
        policy = cp.save_only_these_names("a", "b")
        f = functx.remat(named, policy=policy) if remat else named
        kept = [r for r in functx.saved_residuals(lambda x: torch.exp(f(x)), X) if r.names]
        first = kept[0]
        assert first.source == f"named 'a' at {HERE}:{line_of(named, 1)} in named"
        assert (first.kind, first.names) == ("named", ("a",))
        assert [r.names for r in kept] == [("a",)]

    def test_parameters_and_buffers_by_their_paths(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
                self.register_buffer("scale", torch.full((5,), 2.0))

            def forward(self, x):
                for layer in self.body:
                    x = torch.sin(layer(x)) * self.scale
                return x

        net = Net()
        residuals = functx.saved_residuals(net, X.float())
        assert {r.source: r.kind for r in residuals if not r.made} == {
            "argument x": "argument",
            "parameter body.1.weight": "parameter",
            "buffer scale": "buffer",
        }
        first = next(r for r in residuals if r.made)
        assert first.module == "body.0"
        assert first.source.endswith("Net.forward (body.0)")
        closure = functx.saved_residuals(lambda x: net(x), X.float())
        assert "parameter net.body.1.weight" in sources(closure)
        given = functx.saved_residuals(lambda net, x: net(x), net, X.float())
        assert "parameter net.body.1.weight" in sources(given)

    def test_what_a_function_closes_over_by_its_name(self):
        own = torch.ones(5, dtype=torch.float64)
        assert sources(functx.saved_residuals(lambda x: (torch.sin(x) * own) @ WEIGHTS[1], X)) == [
            "argument x",
            "constant own",
            "constant WEIGHTS[1]",
        ]

    def test_a_view_of_a_larger_tensor_counts_what_it_shows(self):
        big = torch.ones(1000)
        (x,) = functx.saved_residuals(torch.sin, big[:10])
        assert x.nbytes == 40
        (x,) = functx.saved_residuals(torch.sin, torch.ones(1).expand(50))
        assert x.nbytes == 4


class TestTables:
    def test_a_table_of_one_says_what_is_on_the_host(self, capsys):
        region = functx.remat(named, policy=cp.offload(cp.save_only_these_names("a")))
        functx.print_saved_residuals(region, X)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["value", "bytes", "from"]
        assert "named 'a' at" in lines[1]
        assert lines[1].endswith(", in host memory")
        assert lines[2].split() == ["float64[4,5]", "160", "argument", "x"]
        assert [r.on_host for r in functx.saved_residuals(region, X)] == [False, True]
        assert [line.split()[:2] for line in lines[3:]] == [["320", "total"], ["160", "of"]]

    def test_a_table_of_two(self, capsys):
        both = {"plain": layers, "dots": functx.remat(layers, policy=cp.dots_saveable)}
        functx.print_saved_residuals(both, WEIGHTS, X)
        rows = [" ".join(row.split()) for row in capsys.readouterr().out.splitlines()]
        assert rows[0] == "value plain dots from"
        assert f"float64[4,5] 3 x 160 3 x 160 output of aten.mm {LINE}" in rows
        assert f"float64[4,5] 2 x 160 - output of aten.sin {LINE}" in rows
        assert "1,560 1,240 total" in rows

    def test_many_parameters_are_one_row_and_nothing_kept_is_a_sentence(self, capsys):
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(10)))
        functx.print_saved_residuals(model, torch.ones(3, 2))
        rows = [" ".join(row.split()) for row in capsys.readouterr().out.splitlines()]
        assert rows[-4:-2] == ["float32[3,2] 24 argument input", "144 all parameters"]
        model.requires_grad_(False)
        functx.print_saved_residuals(lambda: model(torch.ones(3, 2)))
        assert "nothing is saved: no tensor requires grad" in capsys.readouterr().out
