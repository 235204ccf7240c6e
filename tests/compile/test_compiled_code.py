"""Regions and transforms in code that torch.compile compiles, which takes it seconds each."""

import functools

import pytest
import torch
from cases import numbers
from references import assert_same
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import functx
from functx._core import compiler_warnings

WEIGHTS = [numbers(4, 4, start=float(i)) for i in range(8)]
X = numbers(16, 4)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(compiler_warnings, "_told", set())  # of other tests
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layers(first, second, x):
    return torch.tanh(torch.sin(torch.tanh(x @ first)) @ second)


def chain(remat, weights=WEIGHTS):
    region = remat(layers)

    def loss(x):
        for i in range(0, len(weights), 2):
            x = region(weights[i], weights[i + 1], x)
        return x.square().sum()

    return loss


REGIONS = {
    "remat": functx.remat,
    "checkpoint": lambda f: lambda *args: functx.checkpoint(f, *args, use_reentrant=False),
}


def compiled(f, **options):
    return torch.compile(f, backend="aot_eager", **options)


def kept(out):
    """Numbers that the compiled forward saved for its backward."""
    return sum(t.numel() for t in out.grad_fn.saved_tensors)


def of_products(context, op, *args, **kwargs):
    return op == torch.ops.aten.mm.default


def selective(policy):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda f: lambda *args: functx.checkpoint(f, *args, context_fn=contexts)


POLICIES = [functx.checkpoint_policies.dots_saveable, [torch.ops.aten.mm.default]]
SAVING = [*(lambda f, p=p: functx.remat(f, policy=p) for p in POLICIES), selective(of_products)]


@pytest.mark.parametrize("region", [*REGIONS.values(), *SAVING])
def test_a_region_stays_in_the_graph_and_keeps_what_its_policy_says(region):
    def run(remat):
        weights = [w.clone().requires_grad_() for w in WEIGHTS]
        out = compiled(chain(remat, weights), fullgraph=True)(X)
        return kept(out), torch.autograd.grad(out, weights)

    (numbers_kept, gradients), (all_kept, expected) = run(region), run(lambda f: f)
    assert_same(gradients, expected, eps=8)
    least = run(functx.remat)[0]
    most = least + len(WEIGHTS) * X.numel() if region in SAVING else least
    assert least <= numbers_kept <= most < all_kept > least / 0.6
    assert (least < numbers_kept) == (region in SAVING)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks, at a break
@pytest.mark.parametrize("names", [True, False], ids=["names", "budget"])
def test_names_and_budgets_break_the_graph_and_hold(names):
    """The compiler does not know them, so such a region runs in eager."""

    named = lambda first, second, x: layers(first, second, functx.checkpoint_name(x @ first, "z"))
    weights = [w.clone().requires_grad_() for w in WEIGHTS]
    policy = functx.checkpoint_policies.save_only_these_names("z")
    region = functx.remat(named, policy=policy) if names else functx.remat(named, budget=1.0)
    loss = lambda x: chain(lambda f: region, weights)(x)
    with pytest.warns(RuntimeWarning, match="functx.jit"):
        out = compiled(loss)(X)
    ours = torch.autograd.grad(out, weights)
    assert_same(ours, torch.autograd.grad(chain(lambda f: named, weights)(X), weights), eps=8)


@pytest.mark.parametrize("library", [functx, torch.func], ids=["functx", "torch.func"])
def test_eager_works_after_the_compiler_gave_up(library):
    """It goes on looking at frames, and how many hold an argument is another number then."""

    @torch.compiler.disable
    def hidden(x):
        return x.cos()

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(lambda x: hidden(x), fullgraph=True)(X)

    def along(f):
        return lambda x: library.jvp(f, (x,), (x,))[1]

    twice = along(along(lambda x: (x * x * x).sum()))
    assert_same(functx.vmap(functx.remat(twice))(X), 9 * (X * X * X).sum(1), eps=16)


def test_a_compiled_region_draws_its_random_numbers_once():
    x = X.clone().requires_grad_()
    region = functx.remat(lambda x: nn.functional.dropout(x, 0.5) * x)
    out = compiled(lambda x: region(x).sum(), fullgraph=True)(x)
    out.backward()
    assert set(torch.unique((x.grad / x).detach().round(decimals=6)).tolist()) == {0.0, 4.0}
    assert_same(out.detach(), (x.grad * x / 2).sum().detach(), eps=16)


@pytest.mark.parametrize("make", [functx.remat, lambda m: functx.apply_remat(m, nn.Linear)])
def test_modules_stay_in_the_graph(make):
    def build(make):
        torch.manual_seed(0)
        return make(nn.Sequential(nn.Linear(4, 4).double(), nn.Tanh(), nn.Linear(4, 4).double()))

    net, expected = build(make), build(lambda m: m)
    compiled(net, fullgraph=True)(X).square().sum().backward()
    expected(X).square().sum().backward()
    assert_same([p.grad for p in net.parameters()], [p.grad for p in expected.parameters()], 8)


def test_a_compiled_model_may_get_regions():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4).double(), nn.Tanh()) for _ in range(6)))
    fast = compiled(net, fullgraph=True)
    before = kept(fast(X))
    functx.apply_remat(fast, "_orig_mod.[0-9]")
    assert kept(fast(X)) < before
    functx.remove_remat(fast)
    assert kept(fast(X)) == before


KINDS = [(functx, "remat"), (torch.func, "remat"), (torch.func, "checkpoint"), (functx, "none")]


@pytest.mark.parametrize(("library", "kind"), KINDS)
@pytest.mark.parametrize("alone", [True, False])
def test_transforms_run_in_eager_and_a_warning_names_jit(library, kind, alone):
    stack = library.vmap(library.grad(chain(REGIONS.get(kind, lambda f: f))))
    step = stack if alone else lambda x: stack(2 * x).sin() + x
    expected = functx.vmap(functx.grad(chain(lambda f: f)))
    expected = expected(X) if alone else expected(2 * X).sin() + X
    fast = compiled(step)
    with pytest.warns(RuntimeWarning, match=r"in eager.*functx\.jit") as caught:
        assert_same(fast(X), expected, eps=8)
    assert {w.filename for w in caught} == {__file__}
    torch._dynamo.reset()
    assert_same(fast(X), expected, eps=8)  # without another warning


@pytest.mark.filterwarnings("error")  # of what the compiler can't trace
def test_a_compiled_function_in_a_region_runs_in_eager_and_compiles_nothing_of_the_engine():
    def gradients(remat, inside):
        region = remat(lambda x: inside(WEIGHTS[0], WEIGHTS[1], x).square())
        x = X.clone().requires_grad_()
        return [torch.autograd.grad(region(x).sum(), x) for _ in range(3)]

    frames = torch._dynamo.utils.counters["frames"]
    before = frames["ok"]
    assert_same(gradients(functx.remat, compiled(layers)), gradients(lambda f: f, layers), eps=8)
    assert frames["ok"] == before


def test_a_full_graph_inside_of_a_region_is_an_error_that_says_what_to_compile():
    inside = compiled(lambda x: x.sin().cos(), fullgraph=True)
    loss = functx.remat(functx.remat(lambda x: inside(x).sum()))
    if torch.__version__ >= "2.12":  # before, torch runs it in eager
        with pytest.raises(functx.RematError, match=r"fullgraph=True.*around.*torch\.compile"):
            loss(X)
    x = X.clone().requires_grad_()
    compiled(loss)(x).backward()
    assert_same(x.grad, -X.sin().sin() * X.cos(), eps=8)


def test_a_full_graph_is_refused_by_name():
    step = functx.vmap(functx.grad(lambda x: x.sin().sum()))
    with (
        pytest.raises(torch._dynamo.exc.Unsupported, match=r"functx\.jit"),
        pytest.warns(RuntimeWarning, match=r"functx\.jit"),
    ):
        compiled(step, fullgraph=True)(X)
    assert_same(step(X), X.cos(), eps=4)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:FutureWarning")
@pytest.mark.parametrize("export", [torch.export.export, torch.jit.trace])
def test_what_is_exported_has_no_regions_and_a_warning_says_so(export):
    net = functx.remat(nn.Sequential(nn.Linear(4, 4).double(), nn.Tanh()))
    with pytest.warns(RuntimeWarning, match="drop regions"):
        exported = export(net, (X,))
    again = exported.module() if export is torch.export.export else exported
    assert_same(again(X), net(X), eps=4)
