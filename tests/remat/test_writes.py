"""Writes in place: to intermediates, to arguments, to captures; once, with their gradient."""

import pytest
import torch
from cases import DTYPE, numbers
from nets import seeded
from programs import identity
from references import Operations, assert_same
from right import X, check, right_or_raises
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")


def both(program, eps=8.0):
    right_or_raises(program, eps=eps)


TRANSFORMED = {
    "grad": lambda library, f: library.grad(f)(X),
    "vmap(grad)": lambda library, f: library.vmap(library.grad(f))(torch.stack([X, X.cos()])),
    "grad(grad)": lambda library, f: library.grad(lambda x: library.grad(f)(x).sin().sum())(X),
    "jvp": lambda library, f: library.jvp(f, (X,), (X.cos(),)),
}


def writes(x):
    y = x.sin()
    y.mul_(2)
    y += x
    y[1] = x[0].exp()
    y[2:].mul_(x[:2])
    y.view(2, 2).t().add_(x.exp().view(2, 2))
    z = torch.zeros_like(y)
    z[1:3] = y[:2]
    z.masked_fill_(x > 0.5, 3.0)
    return z * y.relu_() + torch.zeros_like(x).copy_(y)


def scatters(x):
    index = torch.tensor([2, 0, 2])
    y = x * 3
    y.index_add_(0, index, x[:3].sin())
    y.index_put_((index[:1],), x[:1] * 3)
    return y.clone().scatter_(0, index, x[:3].cos()) * y.sin()


class TestWritesToIntermediates:
    def test_in_place_on_intermediates_and_views(self):
        check(lambda remat: remat(writes), eps=16)

    def test_in_place_by_index(self):
        check(lambda remat: remat(scatters), ways=["backward", "grad"], eps=16)

    def test_into_a_list_that_a_stack_reads(self):
        def build(remat):
            def f(x):
                rows = []
                for i in range(3):
                    x = (x * (i + 1)).sin()
                    rows.append(x)
                return torch.stack(rows).unbind(1)

            return remat(f)

        check(build)

    def test_out(self):
        def build(remat):
            def f(x):
                buffer = torch.empty(4, dtype=x.dtype)
                torch.exp(x.detach(), out=buffer)
                return x.sin() * buffer

            return remat(f)

        check(build, ways=["backward"])


WRITES = {
    "add_": lambda t, x: t.add_(x),
    "mul_": lambda t, x: t.mul_(x.exp()),
    "copy_": lambda t, x: t.copy_(x),
    "index": lambda t, x: t.__setitem__(slice(1, 3), x[:2]),
    "a view": lambda t, x: t.view(2, 2).t()[1].mul_(x[:2]),
    "augmented": lambda t, x: t.__iadd__(x),
    "zero_": lambda t, x: t[:2].zero_(),
    "masked_fill_": lambda t, x: t.masked_fill_(t > 0, 2.0),
}


@pytest.mark.parametrize("write", WRITES)
class TestWhatIsWrittenTo:
    """The written tensor is read before and after, inside and outside."""

    def body(self, write, t, x):
        y = t + x
        WRITES[write](t, x)
        return y + t.clone() * x

    def test_a_buffer_argument(self, write):
        def program(remat):
            buffer, x = numbers(4, start=1.0), X.clone().requires_grad_()
            region = remat(lambda t, x: self.body(write, t, x.detach()) * x.sin())
            out = region(buffer, x) + region(buffer, x)
            kept = buffer.clone()
            gradient = torch.autograd.grad(out.sum(), x)
            return out, kept, gradient, buffer

        both(program)

    def test_a_buffer_that_is_captured(self, write):
        def program(remat):
            buffer, x = numbers(4, start=1.0), X.clone().requires_grad_()
            region = remat(lambda x: self.body(write, buffer, x.detach()) * x.sin())
            out = region(x) + region(x)
            kept = buffer.clone()
            gradient = torch.autograd.grad(out.sum(), x)
            return out, kept, gradient, buffer

        both(program)

    def test_an_argument_with_history(self, write):
        def program(remat):
            x, w = X.clone().requires_grad_(), numbers(4, start=1.0).requires_grad_()
            h = w * 2
            out = remat(lambda t, x: self.body(write, t, x))(h, x)
            return out, h, torch.autograd.grad((out + h.exp()).sum(), (x, w))

        both(program)

    def test_a_capture_with_history(self, write):
        def program(remat):
            x, w = X.clone().requires_grad_(), numbers(4, start=1.0).requires_grad_()
            h = w * 2
            out = remat(lambda x: self.body(write, h, x))(x)
            return out, h, torch.autograd.grad((out + h.exp()).sum(), (x, w))

        both(program)

    @pytest.mark.parametrize("captured", [True, False])
    @pytest.mark.parametrize("way", ["grad", "vmap", "jvp"])
    def test_a_tensor_of_a_level(self, write, captured, way):
        def program(remat):
            def f(x):
                h = x * 2
                if captured:
                    out = remat(lambda x: self.body(write, h, x))(x)
                else:
                    out = remat(lambda t, x: self.body(write, t, x))(h, x)
                return (out + h.exp()).sum()

            if way == "jvp":
                return functx.jvp(f, (X,), (X.cos(),))
            f = functx.grad(f)
            return functx.vmap(f)(numbers(3, 4)) if way == "vmap" else f(X)

        both(program, eps=16)


class TestOut:
    @pytest.mark.parametrize("captured", [True, False])
    def test_out(self, captured):
        def program(remat):
            buffer, x = numbers(4, start=1.0), X.clone().requires_grad_()

            def f(x, buffer=buffer):
                before = buffer.clone()
                torch.exp(x.detach(), out=buffer)
                return x.sin() * buffer * before

            region = remat(f)
            out = region(x) if captured else region(x, buffer)
            kept = buffer.clone()
            return out, kept, torch.autograd.grad(out.sum(), x), buffer

        both(program)


class Attention(nn.Module):
    """One head with a key-value cache that it writes to at each step."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12, dtype=DTYPE)
        self.register_buffer("keys", torch.zeros(5, 4, dtype=DTYPE))
        self.register_buffer("values", torch.zeros(5, 4, dtype=DTYPE))

    def forward(self, x, at, detach):
        q, k, v = self.qkv(x).chunk(3)
        self.keys[at] = k.detach() if detach else k
        self.values[at] = v.detach() if detach else v
        seen = slice(0, at + 1)
        keys, values = self.keys.clone(), self.values.clone()  # torch refuses to write to it later
        return torch.softmax(keys[seen] @ q, 0) @ values[seen]


class TestCaches:
    def test_a_key_value_cache(self):
        def program(remat):
            cell = remat(seeded(Attention))
            x = X.clone().requires_grad_()
            out, steps = x, []
            for at in range(4):
                out = cell(out, at, True)
                steps.append(out)
            gradients = torch.autograd.grad(sum(s.sum() for s in steps), (x, *cell.parameters()))
            return steps, gradients, cell.state_dict()

        both(program, eps=32)

    def test_a_key_value_cache_that_is_differentiated(self):
        def program(remat):
            cell = seeded(Attention).qkv
            keys = torch.zeros(5, 4, dtype=DTYPE)

            def step(x, keys, at):
                q, k, v = cell(x).chunk(3)
                keys[at] = k
                return torch.softmax(keys.clone()[: at + 1] @ q, 0) @ keys.clone()[: at + 1] + v

            x = X.clone().requires_grad_()
            out = remat(step)(x, keys, 0)
            return out, keys, torch.autograd.grad(out.sum() + keys.sum(), (x, *cell.parameters()))

        both(program, eps=32)

    @pytest.mark.parametrize("captured", [True, False])
    @pytest.mark.parametrize("library", [functx, torch.func])
    @pytest.mark.parametrize("way", [*TRANSFORMED, "backward"])
    def test_a_cache_that_nothing_is_known_of(self, way, library, captured):
        """No tape knows it before the first step writes to it; then the next steps read from it."""
        weight = numbers(4, start=1.0).requires_grad_()

        def program(remat):
            def steps(x):
                cache = torch.stack([torch.zeros_like(x)] * 3)

                def step(x, i, given=None):
                    own = cache if given is None else given
                    own[i] = x.sin() * weight
                    own[i].mul_(2)
                    return own[: i + 1].sum(0) * x

                for i in range(3):
                    x = remat(step)(x, i) if captured else remat(step)(x, i, cache)
                return (x + cache.exp().sum(0)).sum()

            if way == "backward":
                x = X.clone().requires_grad_()
                return torch.autograd.grad(steps(x), (x, weight))
            return TRANSFORMED[way](library, steps)

        both(program)

    def test_a_cache_that_grows(self):
        """The list belongs to the caller: a region that appends to it appends once."""

        def program(remat):
            cache = []

            def step(x):
                cache.append(x.detach().exp())
                return x.sin() * torch.stack(cache).sum(0)

            x = X.clone().requires_grad_()
            region = remat(step)
            out = region(region(x))
            gradient = torch.autograd.grad(out.sum(), x)
            return out, gradient, list(cache)

        try:
            ours = program(functx.remat)
        except functx.RematError:
            return
        assert_same(ours, program(identity), eps=8)

    def test_a_counter(self):
        def program(remat):
            count = torch.zeros((), dtype=torch.long)

            def step(x):
                count.add_(1)
                return x.sin() * count.clone()

            x = X.clone().requires_grad_()
            region = remat(step)
            out = region(region(x))
            gradients = [torch.autograd.grad(out.sum(), x, retain_graph=True) for _ in range(2)]
            return out, gradients, count

        both(program)

    def test_a_write_through_a_view_made_before(self):
        def program(remat):
            buffer = numbers(4, start=1.0)
            view = buffer[1:3]

            def step(x):
                view.mul_(2)
                return x.sin() * buffer.clone()

            x = X.clone().requires_grad_()
            region = remat(step)
            out = region(region(x))
            return out, torch.autograd.grad(out.sum(), x), buffer

        both(program)

    def test_nested_regions_write(self):
        def program(remat):
            buffer = numbers(4, start=1.0)

            def inner(x):
                buffer.mul_(2)
                return x.sin() * buffer.clone()

            def outer(x):
                buffer.add_(1)
                y = remat(inner)(x) * buffer.clone()
                buffer.add_(x.detach())
                return remat(inner)(y)

            x = X.clone().requires_grad_()
            out = remat(outer)(x)
            return out, torch.autograd.grad(out.sum(), x), buffer

        both(program, eps=16)



    def test_readers_and_the_writer_share_a_copy(self):
        """One more region that reads costs no bytes when the next one writes."""

        def gained(readers):
            buffer = torch.zeros(1000, dtype=DTYPE)
            y = numbers(1000).requires_grad_()
            read = functx.remat(lambda y: y * buffer.sum())
            for _ in range(readers):
                y = read(y)
            with Operations() as operations:
                out = functx.remat(lambda y: (buffer.add_(1), y * buffer.sum())[1])(y)
                return operations.live - out.nbytes

        assert gained(3) == gained(1) == gained(0)
