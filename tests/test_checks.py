"""`determinism_check="values"`, `debug=True`, and what a departure is said to be."""

import re

import pytest
import torch
from cases import DTYPE, numbers
from programs import identity
from references import assert_same
from right import X, check

import functx
from functx._remat._checksum import checksum

pytestmark = pytest.mark.usefixtures("no_hooks")

FLAG = {"on": True}


def switched(x):
    y = x * 2
    y = y.sin() if FLAG["on"] else y.cos()
    return y.exp()


def shorter(x):
    y = x.sin()
    if FLAG["on"]:
        y = y.exp()
    return y


def longer(x):
    y = x.sin()
    if not FLAG["on"]:
        y = y.exp()
    return y


@pytest.fixture(autouse=True)
def _on():
    FLAG["on"] = True


def departure(f, **options):
    x = X.clone().requires_grad_()
    out = functx.remat(f, **options)(x)
    FLAG["on"] = False
    with pytest.raises(functx.ReplayError) as caught:
        out.sum().backward()
    return str(caught.value)


def line(f, offset):
    return f"test_checks.py:{f.__code__.co_firstlineno + offset}"


def test_an_input_in_place_of_a_result_is_found():
    def f(x):
        y = x.sin()
        return (y if FLAG["on"] else x).cos() * y

    assert "reads an input where the forward read a result" in departure(f)


def test_a_tensor_from_outside_in_place_of_a_result_is_found():
    before = X.clone().requires_grad_() * 2

    def f(x):
        y = x.sin()
        return (y if FLAG["on"] else before).cos() * y

    assert "from outside where the forward read a result" in departure(f)


class TestPlaces:
    """Where the replay is, and where the forward was."""

    def test_another_operation(self):
        FLAG["on"] = True
        message = departure(
            lambda x: (
                x.sin() if FLAG["on"] else
                x.cos()
            )
        )  # fmt: skip
        first, second = (int(n) for n in re.findall(r"test_checks\.py:(\d+)", message)[:2])
        assert first == second + 1

    def test_the_same_line_is_named_once(self):
        message = departure(switched)
        assert message.count(line(switched, 2)) == 1

    def test_the_forward_went_on(self):
        assert line(shorter, 3) in departure(shorter)

    def test_the_forward_had_ended(self):
        assert line(longer, 3) in departure(longer)


class TestDebug:
    def test_columns(self):
        message = departure(switched, debug=True)
        table = message.split("\n\n")[1].splitlines()
        assert len({row.index("test_checks.py") for row in table[1:4]}) == 1
        marked = [row for row in table if row.startswith(">")]
        assert len(marked) == 1
        assert "Tensor.sin" in marked[0]
        assert "Tensor.cos" in marked[0]
        assert "float64[4]" in marked[0]
        assert marked[0].count(line(switched, 2)) == 2
        assert "debug=True" not in message

    def test_source_lines(self):
        assert 'y = y.sin() if FLAG["on"] else y.cos()' in departure(switched, debug=True)

    @pytest.mark.parametrize("f", [shorter, longer])
    def test_one_ends_before_the_other(self, f):
        marked = [row for row in departure(f, debug=True).splitlines() if row.startswith(">")]
        assert len(marked) == 1
        assert "exp" in marked[0]
        assert "return" in marked[0]

    def test_only_what_is_near(self):
        def f(x):
            for i in range(100):
                x = x + i
                if i == 50 and not FLAG["on"]:
                    x = x.sin()
            return x.exp()

        table = departure(f, debug=True).split("\n\n")[1].splitlines()
        assert len(table) < 12

    def test_otherwise_it_changes_nothing(self):
        debugging = functx.remat(switched, debug=True)
        for stack in (functx.grad, functx.hessian, lambda f: functx.vmap(functx.grad(f))):
            x = numbers(3, 4) if stack not in (functx.grad, functx.hessian) else X
            ours = stack(lambda x: debugging(x).sum())(x)
            assert_same(ours, stack(lambda x: switched(x).sum())(x), eps=8)


class TestValues:
    """Found under every transform; content with everything that is right."""

    @staticmethod
    def valued(f):
        return functx.remat(f, determinism_check="values")

    @pytest.mark.parametrize("way", ["vjp", "vmap", "jacrev", "nested"])
    def test_finds_other_numbers(self, way):
        hidden = numbers(4, start=1.0)
        f = self.valued(lambda x: (x.sin() * hidden).exp())
        if way == "nested":
            f = functx.remat(lambda x, f=f: f(x).sin())
        f = functx.vmap(f) if way == "vmap" else f
        out, pullback = functx.vjp(f, numbers(3, 4) if way == "vmap" else X)
        hidden.data.add_(1)
        with pytest.raises(functx.ReplayError, match="other values"):
            (functx.vmap(pullback) if way == "jacrev" else pullback)(
                torch.eye(4, dtype=DTYPE) if way == "jacrev" else out
            )

    def test_finds_other_numbers_in_a_second_derivative(self):
        hidden = numbers(4, start=1.0)
        x = X.clone().requires_grad_()
        out = self.valued(lambda x: (x.sin() * hidden).exp())(x)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        hidden.data.add_(1)
        with pytest.raises(functx.ReplayError, match=r"Tensor\.mul.*other values"):
            first.sum().backward()

    @pytest.mark.parametrize("around", ["", "default", "values"])
    @pytest.mark.parametrize("way", ["backward", "grad"])
    def test_nothing_is_left_out_of_replays_of_replays(self, way, around):
        """What the pullback of a pullback does not read is computed, for it is compared."""

        def build(remat):
            f = identity if remat is identity else self.valued
            inner = f(lambda x: (x.sin() * x).exp() @ numbers(4, 4))
            if around:
                outer = f if around == "values" else remat
                inner = outer(lambda x, inner=inner: inner(x).sin() * 2)

            if way == "grad":
                return functx.grad(lambda x: inner(x).sum())
            return lambda x: torch.autograd.grad(inner(x).sum(), x, create_graph=True)

        check(build, ways=[way])

    def test_what_is_written_counts(self):
        """`__setitem__` gives nothing; what it writes to does."""
        hidden = numbers(4, start=1.0)

        def f(x):
            y = torch.zeros(2, 4, dtype=DTYPE)
            y[0] = x.sin()
            y[1] = hidden
            return y

        x = X.clone().requires_grad_()
        out = self.valued(f)(x)
        hidden.data.add_(1)
        with pytest.raises(functx.ReplayError, match="__setitem__"):
            out.sum().backward()

    def test_memory_nobody_wrote_to_is_no_difference(self):
        def build(remat):
            remat = self.valued if remat is functx.remat else remat

            def f(x):
                y = torch.empty(64, 4, dtype=DTYPE)
                scratch = y.view(-1)
                y[:, :] = x.sin()
                fresh = x.new(x.shape).copy_(x) * x.new([1.0, 2.0, 3.0, 4.0])
                return y * x.new_empty(4).copy_(x) * fresh + scratch.sum()

            g = remat(f)
            noise = [torch.randn(64, 4) for _ in range(3)]  # what freed memory looks like
            del noise
            return lambda x: g(g(x).sum(0))

        check(build, ways=["backward", "grad"])

    def test_a_mask_that_was_drawn_anew(self):
        """As many ones, elsewhere: a sum would not tell."""
        order = [torch.tensor([1.0, 0, 1, 0], dtype=DTYPE)]
        f = self.valued(lambda x: x.sin() * order[0].clone())
        x = X.clone().requires_grad_()
        out = f(x)
        order[0].data.copy_(order[0].flip(0))
        with pytest.raises(functx.ReplayError, match="clone"):
            out.sum().backward()

    def test_modes_of_the_user_see_nothing_of_it(self):
        def seen(remat):
            names = []

            class Mode(torch.utils._python_dispatch.TorchDispatchMode):
                only_observes = True

                def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                    names.append(func.__name__)
                    return func(*args, **(kwargs or {}))

            x = X.clone().requires_grad_()
            with Mode():
                remat(switched)(x)
            return [n for n in names if "detach" not in n]

        assert seen(self.valued) == seen(identity)


class TestChecksum:
    def test_permutations_and_bits(self):
        mask = (numbers(4096) > 0).to(DTYPE)
        first = checksum(mask)
        assert first == checksum(mask.clone())
        for other in (1, 1024, 2048, 4095):
            swapped = mask.clone()
            swapped[0], swapped[other] = 1 - mask[0], 1 - mask[other]
            assert checksum(swapped) != first
        assert checksum(mask.float()) != first
        assert checksum(mask.view(64, 64)) != first

    @pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int8, torch.complex128])
    def test_dtypes(self, dtype):
        t = numbers(6).mul(10).to(dtype)
        assert checksum(t) == checksum(t.clone())
        other = t.clone()
        other[3] = 1 - other[3].to(torch.int64) if dtype is torch.bool else other[3] + 1
        assert checksum(other) != checksum(t)

    def test_nan_and_layouts(self):
        nan = torch.tensor([1.0, torch.nan])
        assert checksum(nan) == checksum(nan.clone())
        assert checksum(nan) != checksum(-nan)
        assert checksum(nan.expand(3, 2)) == checksum(nan.expand(3, 2).contiguous())
        assert checksum(nan[:0]) is not None
        z = torch.complex(X, X)
        assert checksum(z.conj()) == checksum(z.conj().resolve_conj())
        assert checksum(X.diag().to_sparse()) != checksum((2 * X).diag().to_sparse())

    def test_inside_wrappers(self):
        sums = []

        def f(x):
            sums.append(checksum(x))
            return x.sum()

        functx.vmap(functx.grad(f))(numbers(3, 4))
        assert sums == [checksum(numbers(3, 4))]


@pytest.mark.filterwarnings("ignore")  # torch's own of quantised tensors: it will move them
def test_a_checksum_of_quantised_numbers():
    """Their bits read as other numbers are a crash of the process."""
    t = torch.linspace(-1, 1, 8)
    by_tensor = [torch.quantize_per_tensor(t * s, 0.1, 3, torch.qint8) for s in (1.0, 1.0, 0.5)]
    first, same, other = map(checksum, by_tensor)
    assert first == same != other
    scales, zeros = torch.tensor([0.1, 0.2]), torch.zeros(2)
    by_channel = torch.quantize_per_channel(t.view(2, 4), scales, zeros, 0, torch.qint8)
    assert checksum(by_channel) is not None
