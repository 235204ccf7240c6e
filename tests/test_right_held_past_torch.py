"""What hooks and custom Functions hold of NumPy's memory: that of the forward, or an error.

A replay makes it anew, unseen. Where it is not what it was, the pullback would read another one.
"""

import functools

import numpy as np
import pytest
import torch

import functx

DTYPE = torch.float64
X = torch.linspace(0.1, 1, 3, dtype=DTYPE)


def from_numpy(k, convert=torch.from_numpy):
    return convert(np.full(3, float(k)))


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, make):
        m = make()
        ctx.save_for_backward(m)
        return x * m

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


class SavesUnread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, make):
        ctx.save_for_backward(make())
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


class KeepsAList(torch.autograd.Function):
    @staticmethod
    def forward(x, make):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.masks = [inputs[1]()]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.masks[0], None


class KeepsAnArray(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, make):
        ctx.mask = make(np.asarray)
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * torch.from_numpy(ctx.mask), None


class Scale:
    def __init__(self, m):
        self.m = m

    def __call__(self, g):
        return g * self.m

    def method(self, g):
        return g * self.m


def hooked(hook_of, convert=torch.from_numpy):
    def f(x, make):
        y = x * 1
        y.register_hook(hook_of(make(convert)))
        return y

    return f


BODIES = {
    "saved": Saves.apply,
    "saved, unread": SavesUnread.apply,
    "in a list": KeepsAList.apply,
    "an array": KeepsAnArray.apply,
    "hook": hooked(lambda m: lambda g: g * m),
    "hook, array": hooked(lambda a: lambda g: g * torch.from_numpy(a), np.asarray),
    "hook, default": hooked(lambda m: lambda g, m=m: g * m),
    "hook, partial": hooked(lambda m: functools.partial(torch.mul, m)),
    "hook, object": hooked(Scale),
    "hook, method": hooked(lambda m: Scale(m).method),
}


def gradient(f, x=X):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x).sin().sum(), x)[0]


@pytest.mark.parametrize("check", ["default", "values"])
@pytest.mark.parametrize("name", BODIES)
def test_another_one_in_the_replay_raises(name, check):
    """A counter that nothing restores: not found were this a gradient by another factor."""
    runs = []

    def f(x):
        return BODIES[name](x.sin(), lambda *a: from_numpy(len(runs) + 1, *a))

    def counted(x):
        runs.append(1)
        return f(x)

    y = functx.remat(counted, determinism_check=check)(x := X.clone().requires_grad_())
    with pytest.raises(functx.ReplayError, match=r"holds other values|keeps other numbers"):
        torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("name", BODIES)
def test_the_same_in_the_replay_is_right(name):
    def f(x):
        return BODIES[name](x.sin(), lambda *a: from_numpy(2, *a))

    for _ in range(8):
        assert torch.equal(gradient(functx.remat(f)), gradient(f))


@pytest.mark.parametrize("name", BODIES)
def test_drawn_from_a_generator_is_right(name):
    def program(remat):
        generator = np.random.default_rng(0)

        def f(x):
            return BODIES[name](
                x.sin(), lambda convert=torch.from_numpy: convert(generator.random(3))
            )

        return [gradient(remat(f)) for _ in range(3)] + [from_numpy(generator.random())]

    for ours, plain in zip(program(functx.remat), program(lambda f: f), strict=True):
        assert torch.equal(ours, plain)


def test_what_the_program_changes_itself_is_read_as_it_is_then():
    """A hook reads it when it runs, with and without: no error, where the hook's is the same."""
    mask = np.full(3, 1.0)
    m = torch.from_numpy(mask)

    def f(x):
        y = x.sin()
        y.register_hook(lambda g: g * m)
        return y

    def program(remat):
        mask[:] = 1
        x = X.clone().requires_grad_()
        y = remat(f)(x).sum()
        mask[:] = 3
        return torch.autograd.grad(y, x)[0]

    assert torch.equal(program(functx.remat), program(lambda f: f))


def test_what_a_function_was_given_is_not_hashed_again(monkeypatch):
    """It is compared as an input, and may be large."""
    from functx._remat import _past_torch

    seen = []
    held = _past_torch.held
    monkeypatch.setattr(_past_torch, "held", lambda x, *a: seen.append(x) or held(x, *a))

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, m):
            ctx.save_for_backward(m)
            return x * m

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0], None

    m = from_numpy(3)
    f = functx.remat(lambda x: Product.apply(x.sin(), m))
    assert torch.equal(gradient(f), gradient(lambda x: x.sin() * m))
    assert not any(isinstance(x, torch.Tensor) for x in seen)


def test_under_transforms():
    """As at the base level: with another one an error, with the same one the same."""
    runs = []

    def f(x):
        runs.append(1)
        return KeepsAList.apply(x.sin(), lambda *a: from_numpy(len(runs), *a)).sum()

    with pytest.raises(functx.ReplayError, match="keeps other numbers"):
        functx.grad(functx.remat(f))(X)

    def same(x):
        return KeepsAList.apply(x.sin(), lambda *a: from_numpy(2, *a)).sum()

    assert torch.equal(functx.grad(functx.remat(same))(X), functx.grad(same)(X))


class Trainer:
    """What a program keeps of its own, some of which its hooks read."""

    def __init__(self, k=2.0):
        self.mask = self.veil = np.full(3, k)
        self.losses = np.zeros(1)

    def save(self, g):
        self.saved = g.clone()

    def scale(self, g):
        return scaled(self, g)

    def by_name(self, g):
        return g * torch.from_numpy(getattr(self, "".join(("ve", "il"))))

    def __call__(self, g):
        return self.scale(g)


class TrainerOfSlots:
    __slots__ = ("losses", "mask", "veil")

    def __init__(self, k=2.0):
        self.mask = self.veil = np.full(3, k)
        self.losses = np.zeros(1)

    scale, by_name, __call__ = Trainer.scale, Trainer.by_name, Trainer.__call__


def scaled(trainer, g):
    return g * torch.from_numpy(trainer.mask)


def hook_that(hook_of):
    def f(x, trainer):
        y = x.sin()
        y.register_hook(hook_of(trainer))
        return y * y

    return f


class KeepsTheTrainer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, trainer):
        ctx.trainer = trainer
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return ctx.trainer.scale(g), None


HELD_BY_AN_OBJECT = {
    "method": hook_that(lambda t: t.scale),
    "a function": hook_that(lambda t: lambda g: t.scale(g)),
    "the object": hook_that(lambda t: t),
    "by a name made up": hook_that(lambda t: t.by_name),
    "custom Function": lambda x, t: KeepsTheTrainer.apply(x.sin(), t),
}


@pytest.mark.parametrize("name", HELD_BY_AN_OBJECT)
def test_what_the_program_binds_in_an_object_is_read_as_it_is_then(name):
    """The same object in both runs: a replay has not made it."""

    def program(remat):
        trainer = Trainer()
        g = remat(lambda x: HELD_BY_AN_OBJECT[name](x, trainer))
        found = []
        for k in range(8):
            x = X.clone().requires_grad_()
            y = g(x).sum()
            trainer.losses = np.append(trainer.losses, y.item())
            trainer.mask = np.full(3, 3.0 + k)
            found.append(torch.autograd.grad(y, x)[0])
        return torch.stack(found)

    assert torch.equal(program(functx.remat), program(lambda f: f))


@pytest.mark.parametrize("make", [Trainer, TrainerOfSlots])
@pytest.mark.parametrize("name", HELD_BY_AN_OBJECT)
def test_an_object_that_the_replay_makes_anew_is_compared_by_what_code_names(name, make):
    def run(mask, losses):
        runs = []

        def f(x):
            runs.append(1)
            trainer = make(2.0 + mask * len(runs))
            trainer.losses = np.full(3, float(losses * len(runs)))
            if name == "by a name made up":
                trainer.mask = None
            return HELD_BY_AN_OBJECT[name](x, trainer)

        return torch.autograd.grad(functx.remat(f)(x := X.clone().requires_grad_()).sum(), x)[0]

    with pytest.raises(functx.ReplayError, match=r"holds other values|keeps other numbers"):
        run(1, 0)
    if name != "by a name made up":
        assert torch.equal(run(0, 1), run(0, 0))


class Lies:
    dtype = "none"

    @property
    def __array_interface__(self):
        return {}

    def tobytes(self):
        raise TypeError("no bytes")


def test_what_cannot_be_looked_at_is_passed_by():
    class NoShape:
        @property
        def __array_interface__(self):
            return {"shape": (2,), "typestr": "|u1", "data": b"ab", "version": 3}

        def tobytes(self):
            return b"ab"

    parts = [Lies(), NoShape(), np.array([Trainer(), None], dtype=object), np.zeros(2, "f4,i4")]

    def f(x):
        y = x.sin()
        y.register_hook(lambda g: parts and g * 2)
        return y

    assert torch.equal(gradient(functx.remat(f)), gradient(f))


def test_of_large_arrays_a_sample_is_compared(monkeypatch):
    """Of all that a hook holds, 1 MiB is hashed; and of a broadcast what is in memory."""
    from functx._remat import _past_torch

    hashed = []

    def counted(x):
        hashed.append(len(x) if isinstance(x, bytes) else 0)
        return hash(x)

    monkeypatch.setattr(_past_torch, "hash", counted, raising=False)
    large = [np.zeros((2, 200_000)) for _ in range(4)]
    large += [np.zeros((3, 2, 70_000))[:, ::-1], np.broadcast_to(np.zeros(3), (40_000, 3_000, 3))]
    large += [torch.from_numpy(np.zeros(200_000)), *(np.zeros(60_000) for _ in range(4))]
    k = [0]

    def f(x):
        held = [a + 0.0 if isinstance(a, np.ndarray) and a.strides[0] else a for a in large]
        held.append(np.full(200_000, float(k[0])))
        y = x.sin()
        y.register_hook(lambda g: g * len(held))
        return y

    assert torch.equal(gradient(functx.remat(f)), gradient(f))
    # In a forward and a replay; samples are of no more than 256 entries of 8 bytes.
    assert 2 * 480_000 <= sum(hashed) <= 2 * ((1 << 20) + len(large) * 8 * 513)

    y = functx.remat(f)(x := X.clone().requires_grad_())
    k[0] = 1
    with pytest.raises(functx.ReplayError, match="holds other values"):
        torch.autograd.grad(y.sum(), x)


def test_of_a_broadcast_what_is_in_memory_is_compared():
    k = [0]

    def f(x):
        a = np.zeros(1000)
        a[1] = k[0]
        a = np.broadcast_to(a, (10**6, 1000))
        y = x.sin()
        y.register_hook(lambda g: g * a.shape[0])
        return y

    assert torch.equal(gradient(functx.remat(f)), gradient(f))
    y = functx.remat(f)(x := X.clone().requires_grad_())
    k[0] = 1
    with pytest.raises(functx.ReplayError, match="holds other values"):
        torch.autograd.grad(y.sum(), x)
