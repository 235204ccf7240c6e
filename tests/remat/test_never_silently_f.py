"""Rule 7: what saves nothing where something is differentiated warns, or raises."""

import functools
import inspect
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import numbers
from references import Operations

import functx

X = numbers(64, 64)
BYTES = X.numel() * X.element_size()
W = numbers(64, 64, start=1.0) / 8


def body(x):
    for _ in range(6):
        x = torch.tanh(x @ W)
    return x


def generator(x):
    yield body(x)


async def coroutine(x):
    return body(x)


async def asynchronous_generator(x):
    yield body(x)


FORMS = {
    "remat": lambda f, x: functx.remat(f)(x),
    "a partial": lambda f, x: functx.remat(functools.partial(f))(x),
    "checkpoint": lambda f, x: functx.checkpoint(f, x, use_reentrant=False),
}
LATER = [generator, coroutine, asynchronous_generator]


@pytest.mark.parametrize(("f", "form"), [*zip(LATER, FORMS, strict=True)])
def test_a_body_that_runs_after_the_call(f, form):
    x = X.clone().requires_grad_()
    with pytest.warns(UserWarning, match=r"generator|coroutine") as caught:
        out = FORMS[form](f, x)
    assert any(w.filename == __file__ for w in caught)
    if inspect.iscoroutine(out):
        out.close()


def in_a_thread(f):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(f).result()


class Tagged(torch.Tensor):
    pass


def calls():
    """Ways to call a region of six layers."""
    remat = functx.remat
    linear = torch.nn.Sequential(*[torch.nn.Linear(64, 64), torch.nn.Tanh()] * 6).double()
    return {
        "plainly": lambda x: remat(body)(x),
        "of a partial of a region": lambda x: remat(remat(body))(x),
        "of a module": lambda x: remat(linear)(x),
        "of a subclass of tensors": lambda x: remat(body)(x.as_subclass(Tagged)),
        "of a scripted function": lambda x: remat(torch.jit.script(scripted))(x),
        "of what runs in a thread": lambda x: remat(lambda x: in_a_thread(lambda: body(x)))(x),
        "of what enables grad": lambda x: enabled(remat)(x),
        "under vmap": lambda x: functx.vmap(remat(lambda x: body(x[None])[0]))(x),
        "under functionalize": lambda x: torch.func.functionalize(remat(body))(x),
        "with a hook on saved tensors": lambda x: hooked(remat(body), x),
        "under autocast": lambda x: autocast(remat(body), x),
    }


def scripted(x):
    w = x.detach() * 0 + 0.01
    for _ in range(6):
        x = torch.tanh(x @ w)
    return x


def enabled(remat):
    def f(x):
        with torch.enable_grad():
            return body(x)

    return remat(f)


def hooked(f, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return f(x)


def autocast(f, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return f(x)


@pytest.mark.parametrize("way", calls())
def test_a_region_saves_memory_or_says_why_not(way):
    run = calls()[way]
    x = X.clone().requires_grad_()
    with warnings.catch_warnings(), Operations() as operations:
        warnings.simplefilter("ignore")
        try:
            run(x)
        except functx.RematError:
            return
    with warnings.catch_warnings(record=True) as caught, Operations() as operations:
        warnings.simplefilter("always")
        out = run(x)
    said = any("remat" in str(w.message) for w in caught)
    assert out.requires_grad
    assert said or operations.live <= 2.5 * BYTES, f"{operations.live / BYTES} kept, and no word"


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_where_nothing_is_differentiated_nothing_is_said(context):
    with context(), warnings.catch_warnings():
        warnings.simplefilter("error")
        functx.remat(body)(X)
        functx.vmap(functx.remat(lambda x: body(x[None])))(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not functx.remat(body)(X).requires_grad
