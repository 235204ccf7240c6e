"""What a replay can't reproduce: right, or an error with the place, the cause and the remedy."""

import contextlib
import io

import pytest
import torch
from cases import DTYPE, numbers
from nets import seeded
from programs import identity
from references import assert_same, count
from right import X, right_or_raises
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

SETTINGS = {"flag": True, "factor": 2.0, "power": 2, "size": 4, "dtype": torch.float64, "rows": []}
CHANGED = {
    "flag": False,
    "factor": 3.0,
    "power": 3,
    "size": 2,
    "dtype": torch.float32,
}


def flags(x):
    return (x.sin() if SETTINGS["flag"] else x.cos()).exp()


def factors(x):
    return x.sin() * SETTINGS["factor"]


def powers(x):
    return x.sin() ** SETTINGS["power"]


def sizes(x):
    return x.sin().view(-1, SETTINGS["size"]).exp().sum(0)


def dtypes(x):
    return x.sin().to(SETTINGS["dtype"]).exp().double()


def made(x):
    return x.sin() * torch.tensor([SETTINGS["factor"]], dtype=DTYPE)


def filled(x):
    return x.sin() * torch.full((4,), SETTINGS["factor"], dtype=DTYPE)


def looped(x):
    for _ in range(SETTINGS["power"]):
        x = x.sin()
    return x


def skipped(x):
    y = x.sin()
    if SETTINGS["flag"]:
        y = y * y.exp()
    return y * x


READERS = {
    flags: "flag",
    factors: "factor",
    powers: "power",
    sizes: "size",
    dtypes: "dtype",
    made: "factor",
    filled: "factor",
    looped: "power",
    skipped: "flag",
}


@pytest.fixture(autouse=True)
def _settings():
    before = dict(SETTINGS)
    yield
    SETTINGS.update(before)


def pulled_back(remat, f, change, way, **options):
    """Forward, a change, then the backward."""
    f = remat(f, **options)
    if way == "backward":
        x = X.clone().requires_grad_()
        out = f(x)
        change()
        return torch.autograd.grad(out.sum(), x)
    if way == "vmap":
        f = functx.vmap(f)
    out, pullback = functx.vjp(f, numbers(3, 4) if way == "vmap" else X)
    change()
    return pullback(torch.ones_like(out))


@pytest.mark.parametrize("way", ["backward", "vjp", "vmap"])
@pytest.mark.parametrize("f", READERS, ids=lambda f: f.__name__)
class TestGlobals:
    """Control flow that went another way, numbers, shapes and dtypes that changed."""

    def change(self, f):
        SETTINGS[READERS[f]] = CHANGED[READERS[f]]

    def test_found(self, f, way):
        before = dict(SETTINGS)

        def program(remat):
            SETTINGS.update(before)
            return pulled_back(remat, f, lambda: self.change(f), way)

        error = right_or_raises(program, match=f.__name__)
        if error is not None:
            assert isinstance(error, functx.ReplayError)

    def test_the_replay_is_trusted_if_asked(self, f, way):
        """``determinism_check="none"``: no complaint, whatever comes out."""
        try:
            pulled_back(functx.remat, f, lambda: self.change(f), way, determinism_check="none")
        except functx.RematError as error:
            raise AssertionError("it was told not to check") from error
        except RuntimeError:
            assert f in (sizes, dtypes)  # the shapes or dtypes of cotangents do not fit


class Switched(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=DTYPE)
        self.layer = {"dropout": nn.Dropout(0.5), "norm": nn.BatchNorm1d(4, dtype=DTYPE)}[kind]
        self.factor = 2.0
        self.branch = True

    def forward(self, x):
        x = self.layer(self.linear(x)) * self.factor
        return x.sin() if self.branch else x.cos()


CHANGES = {
    "eval": lambda m: m.eval(),
    "eval of a part": lambda m: m.layer.eval(),
    "factor": lambda m: setattr(m, "factor", 3.0),
    "branch": lambda m: setattr(m, "branch", False),
    "a layer": lambda m: setattr(m, "layer", nn.Tanh()),
    "a parameter": lambda m: setattr(m.linear, "weight", nn.Parameter(m.linear.weight * 2)),
    "in place": lambda m: torch.no_grad()(m.linear.weight.mul_)(2),
    "the momentum": lambda m: setattr(m.layer, "momentum", 0.9),
    "the rate": lambda m: setattr(m.layer, "p", 0.1),
}


class TestModules:
    @pytest.mark.parametrize("kind", ["dropout", "norm"])
    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("wrap", ["module", "function"])
    def test_changed_between_forward_and_backward(self, change, kind, wrap):
        def program(remat):
            module = seeded(Switched, kind)
            f = remat(module) if wrap == "module" else remat(lambda x: module(x))
            x = numbers(5, 4).requires_grad_()
            torch.manual_seed(3)
            out = f(x)
            CHANGES[change](module)
            return torch.autograd.grad(out.square().sum(), x)

        right_or_raises(program)


class TestTensors:
    """A tensor that was modified in place between forward and backward."""

    @pytest.mark.parametrize(
        "kind", ["argument", "keyword", "nested", "capture", "constant", "parameter", "attribute"]
    )
    @pytest.mark.parametrize("saved", [True, False])
    def test_modified(self, kind, saved):
        """``saved``: torch itself keeps the tensor for its backward, and refuses."""

        def program(remat):
            x, leaf = X.clone().requires_grad_(), numbers(4, start=1.0).requires_grad_()
            t = {
                "constant": lambda: leaf.detach().clone(),
                "parameter": lambda: nn.Parameter(leaf.detach().clone()),
            }.get(kind, lambda: leaf * 2)()

            def f(x, t):
                return (x + t.sin() if saved else x.sin() + t * 2).exp()

            class Holder:
                def __init__(self):
                    self.t = t

                def __call__(self, x):
                    return f(x, self.t)

            if kind == "argument":
                out = remat(f)(x, t)
            elif kind == "keyword":
                out = remat(f)(x, t=t)
            elif kind == "nested":
                out = remat(lambda x, tree: f(x, tree["a"][0][0]))(x, {"a": [[t], 3]})
            elif kind == "attribute":
                out = remat(Holder())(x)
            else:
                out = remat(lambda x: f(x, t))(x)
            with torch.no_grad():
                t.mul_(1.5)
            return torch.autograd.grad(out.sum(), x)

        error = right_or_raises(program)
        if isinstance(error, functx.RematError):
            assert "in place" in str(error)

    def test_the_argument_of_an_optimizer(self):
        """A step between forward and backward."""

        def program(remat):
            net = seeded(nn.Linear, 4, 4).double()
            optimizer = torch.optim.SGD(net.parameters(), 0.5)
            f = remat(lambda x: net(x).sin())
            x = X[None].clone().requires_grad_()
            f(x).sum().backward()
            out = f(x)
            optimizer.step()
            return torch.autograd.grad(out.sum(), x)

        right_or_raises(program)

    @pytest.mark.parametrize("way", ["vjp", "vmap"])
    def test_below_transforms(self, way):
        def program(remat):
            w = numbers(4, start=1.0)
            f = remat(lambda x: (x * w).sin().exp())
            f = functx.vmap(f) if way == "vmap" else f
            out, pullback = functx.vjp(f, numbers(3, 4))
            w.mul_(2)
            return pullback(out)

        right_or_raises(program)

    def test_an_intermediate_that_is_written_to_later(self):
        def program(remat):
            x = X.clone().requires_grad_()
            h = x * 2
            out = remat(lambda h: h * 3)(h)
            h.mul_(5)
            return torch.autograd.grad((out * h).sum(), x)

        right_or_raises(program)


class TestDataFromOutside:
    def test_an_iterator(self):
        def program(remat):
            data = iter([2.0, 3.0, 4.0, 5.0])
            f = remat(lambda x: x.sin() * torch.tensor([next(data)], dtype=DTYPE))
            x = X.clone().requires_grad_()
            return torch.autograd.grad(f(x).sum(), x)

        right_or_raises(program)

    def test_a_file(self):
        def program(remat):
            file = io.StringIO("2 3 4 5 6 7 8 9")
            f = remat(lambda x: x.sin() * float(file.read(2)))
            x = X.clone().requires_grad_()
            return torch.autograd.grad(f(x).sum(), x)

        right_or_raises(program)

    def test_a_list_of_tensors_that_runs_out(self):
        def program(remat):
            batches = [numbers(4, start=float(i)) for i in range(4)]
            f = remat(lambda x: x.sin() * batches.pop())
            x = X.clone().requires_grad_()
            return torch.autograd.grad(f(x).sum(), x)

        right_or_raises(program)

    def test_a_numpy_array(self):
        def program(remat):
            array = X.numpy().copy()
            f = remat(lambda x: x.sin() * torch.from_numpy(array))
            x = X.clone().requires_grad_()
            out = f(x)
            array *= 2
            return torch.autograd.grad(out.sum(), x)

        plain = program(identity)  # torch has no way to see it: what it saved has changed
        with contextlib.suppress(functx.RematError):
            assert_same(program(functx.remat), plain)


class TestValues:
    """``determinism_check="values"``."""

    @staticmethod
    def drifting(check):
        """The same operations, on memory that changed behind torch's back."""
        hidden = numbers(4, start=1.0)
        f = functx.remat(lambda x: x.sin() * hidden.exp(), determinism_check=check)
        x = X.clone().requires_grad_()
        out = f(x)
        hidden.data.mul_(2)
        return torch.autograd.grad(out.sum(), x)

    def test_finds_other_numbers(self):
        with pytest.raises(functx.ReplayError):
            self.drifting("values")

    def test_finds_other_random_numbers(self):
        f = functx.remat(
            lambda x: x.sin() * torch.rand_like(x),
            determinism_check="values",
            preserve_rng_state=False,
        )
        with pytest.raises(functx.ReplayError):
            f(X.clone().requires_grad_()).sum().backward()

    def test_is_content_with_the_same_numbers(self):
        def run(f):
            x = X.clone().requires_grad_()
            nan = torch.where(x > 0, x, torch.nan)
            return torch.autograd.grad(f(nan).nansum(), x)

        f = functx.remat(lambda x: x.sin() * torch.rand_like(x), determinism_check="values")
        torch.manual_seed(1)
        ours = run(f)
        torch.manual_seed(1)
        assert_same(ours, run(lambda x: x.sin() * torch.rand_like(x)))

    def test_is_content_under_transforms(self):
        def loss(remat):
            f = remat(lambda x: x.sin().exp())
            return lambda x: f(x).sum()

        checked = loss(lambda f: functx.remat(f, determinism_check="values"))
        for stack in (functx.grad, lambda f: functx.vmap(functx.grad(f)), functx.hessian):
            x = numbers(2, 3)[0] if stack is functx.hessian else numbers(2, 3)
            assert_same(stack(checked)(x), stack(loss(identity))(x), eps=8)

    def test_runs_everything_again(self):
        """Pruned operations could not be compared."""

        def f(x):
            return x.sin().exp(), (x.cos() * 2).tanh() + 3

        def replayed(check):
            x = X.clone().requires_grad_()
            first, _ = functx.remat(f, determinism_check=check)(x)
            return count(lambda: first.sum().backward())

        # The derivative of sin is a cos; the other one is of the result that nobody pulls back.
        assert replayed("default")["cos"] == 1
        assert replayed("values")["cos"] == 2


class TestMessages:
    def test_names_region_and_place(self):
        error = self.error()
        assert "flags" in str(error)
        assert "sin" in str(error)
        assert "cos" in str(error)

    def test_debug_shows_both_sequences_with_source_lines(self):
        text = self.error(debug=True)
        text = "\n".join([str(text), *getattr(text, "__notes__", [])])
        assert text.count("test_right_or_raises.py") >= 2
        lines = [line for line in text.splitlines() if "sin" in line and "cos" in line]
        assert lines, "the two sequences stand side by side"

    def test_without_debug_the_way_to_it_is_named(self):
        assert "debug=True" in str(self.error())

    @staticmethod
    def error(**options):
        with pytest.raises(functx.ReplayError) as caught:
            pulled_back(
                functx.remat, flags, lambda: SETTINGS.update(flag=False), "backward", **options
            )
        return caught.value
