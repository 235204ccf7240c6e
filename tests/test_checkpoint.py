"""functx.checkpoint and checkpoint_sequential take what torch's take, and compose."""

import contextlib
import functools
import inspect

import pytest
import torch
import torch.utils.checkpoint as theirs
from cases import DTYPE, deep_mlp, numbers
from nets import Block, seeded
from references import assert_same, count
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("hooks")


def gradients(loss, *tensors):
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(loss(*tensors), tensors)


def body(x, y=None, *, scale=1.0):
    y = x if y is None else y
    return torch.sin(x) * torch.exp(y) * scale


class TestDropIn:
    @pytest.mark.parametrize("name", ["checkpoint", "checkpoint_sequential"])
    def test_takes_every_argument_of_torchs(self, name):
        ours = inspect.signature(getattr(functx, name)).parameters
        for parameter in inspect.signature(getattr(theirs, name)).parameters.values():
            mine = ours[parameter.name]
            assert mine.kind == parameter.kind
            assert parameter.default in (mine.default, parameter.empty)

    @pytest.mark.parametrize("reentrant", [None, False, True])
    def test_values_and_gradients(self, reentrant):
        def loss(call):
            return lambda x: call(body, x, 2 * x).sum()

        ours = gradients(loss(functools.partial(functx.checkpoint, use_reentrant=reentrant)), X)
        assert_same(ours, gradients(loss(lambda f, *args: f(*args)), X))

    @pytest.mark.parametrize("reentrant", [None, False, True])
    def test_under_transforms(self, reentrant):
        def loss(x):
            return functx.checkpoint(body, x, use_reentrant=reentrant).sum()

        assert_same(
            functx.vmap(functx.grad(loss))(numbers(3, 4)),
            functx.vmap(functx.grad(lambda x: body(x).sum()))(numbers(3, 4)),
        )

    def test_keyword_arguments_reach_the_function(self):
        out = functx.checkpoint(body, X, y=X, scale=3.0, use_reentrant=False)
        assert_same(out, body(X, X, scale=3.0))

    def test_of_a_module_with_its_hooks(self):
        block, calls = seeded(Block), []
        block.register_forward_hook(lambda *_: calls.append(1))
        x = numbers(2, 3).requires_grad_()
        out = functx.checkpoint(block, x, use_reentrant=False)
        out.sum().backward()
        ours = [p.grad for p in block.parameters()]
        assert len(calls) == 2  # in the forward, and in the replay, as torch's
        plain = seeded(Block)
        plain(numbers(2, 3)).sum().backward()
        assert_same(ours, [p.grad for p in plain.parameters()])

    def test_parameters_get_gradients_where_no_argument_requires_one(self):
        block = seeded(Block)
        functx.checkpoint(block, numbers(2, 3), use_reentrant=True).sum().backward()
        assert all(p.grad is not None for p in block.parameters())

    @pytest.mark.parametrize("reentrant", [None, False, True])
    def test_keeps_as_much_as_torchs(self, reentrant):
        weights, x, _ = deep_mlp(layers=8)

        def run(checkpoint):
            y = x
            for w in [w.detach().requires_grad_() for w in weights]:
                y = checkpoint(lambda w, y: torch.tanh(torch.sin(y @ w)), w, y)
            y.sum().backward()

        plain = functx.memory.peak(run, lambda f, *args: f(*args))
        ours = functx.memory.peak(
            run, functools.partial(functx.checkpoint, use_reentrant=reentrant)
        )
        assert ours < 0.7 * plain

    def test_random_numbers_are_those_of_the_forward(self):
        def dropped(x):
            return torch.nn.functional.dropout(x, 0.5) * x

        torch.manual_seed(3)
        ours = gradients(lambda x: functx.checkpoint(dropped, x).sum(), X)
        torch.manual_seed(3)
        assert_same(ours, gradients(lambda x: dropped(x).sum(), X))


X = numbers(4)


class TestOptions:
    def test_reentrant_takes_no_keyword_arguments(self):
        with pytest.raises(ValueError, match=r"scale.*use_reentrant=False"):
            functx.checkpoint(body, X, use_reentrant=True, scale=2.0)

    @pytest.mark.parametrize("option", [{"context_fn": lambda: None}, {"debug": True}])
    def test_reentrant_takes_no_contexts(self, option):
        with pytest.raises(ValueError, match="use_reentrant=False"):
            functx.checkpoint(body, X, use_reentrant=True, **option)

    @pytest.mark.parametrize(
        "options", [{"use_reentrant": "no"}, {"early_stop": 0}, {"debug": "yes"}]
    )
    def test_flags_are_flags(self, options):
        with pytest.raises(TypeError, match=next(iter(options))):
            functx.checkpoint(body, X, **options)

    def test_values_that_are_not_known(self):
        with pytest.raises(ValueError, match="determinism_check"):
            functx.checkpoint(body, X, determinism_check="sometimes")
        with pytest.raises(ValueError, match="preserve_rng_state"):
            functx.checkpoint(body, X, preserve_rng_state="sometimes")

    def test_a_result_in_place_of_the_function(self):
        with pytest.raises(TypeError, match=r"checkpoint\(function, \*args\)"):
            functx.checkpoint(body(X), X)

    def test_errors_are_those_that_guard_torchs(self):
        flag = [True]
        x = X.clone().requires_grad_()
        out = functx.checkpoint(lambda x: x.sin().sin() if flag[0] else x.cos(), x)
        flag[0] = False
        with pytest.raises(theirs.CheckpointError):
            out.sum().backward()

    @staticmethod
    def sums_in_the_replay(**options):
        x = X.clone().requires_grad_()
        out = functx.checkpoint(lambda x: torch.sum(x.sin()), x, **options)
        return count(out.backward)["sum"]

    def test_as_a_decorator(self):
        @functx.checkpoint(use_reentrant=False)
        def f(x):
            return x.sin()

        assert f.__name__ == "f"
        x = numbers(3)
        assert_same(functx.vmap(functx.grad(f))(x), x.cos())
        with pytest.raises(TypeError, match="callable"):
            functx.checkpoint(use_reentrant=False)(3)

    def test_early_stop(self):
        assert self.sums_in_the_replay() == 0
        assert self.sums_in_the_replay(early_stop=False) == 1
        assert self.sums_in_the_replay(use_reentrant=True) == 1

    def test_early_stop_is_overruled_by_torchs_context(self):
        with theirs.set_checkpoint_early_stop(False):
            assert self.sums_in_the_replay(early_stop=True) == 1
        with theirs.set_checkpoint_early_stop(True):
            assert self.sums_in_the_replay(early_stop=False) == 0

    def test_debug_is_overruled_by_torchs_context(self):
        with (
            theirs.set_checkpoint_debug_enabled(True),
            pytest.raises(ValueError, match="exclude"),
        ):
            functx.checkpoint(body, X, context_fn=lambda: None)

    def test_without_gradients_it_is_the_function(self):
        with torch.no_grad():
            assert_same(functx.checkpoint(body, X), body(X))


class TestContexts:
    def contexts(self, log):
        @contextlib.contextmanager
        def context(name):
            log.append(name)
            yield

        return lambda: (context("forward"), context("replay"))

    def test_are_entered(self):
        log, x = [], X.clone().requires_grad_()
        out = functx.checkpoint(body, x, context_fn=self.contexts(log), use_reentrant=False)
        assert log == ["forward"]
        out.sum().backward()
        assert log == ["forward", "replay"]
        assert_same(x.grad, gradients(lambda x: body(x).sum(), X)[0])

    def test_are_entered_under_transforms(self):
        log = []

        def loss(x):
            return functx.checkpoint(body, x, context_fn=self.contexts(log)).sum()

        functx.vmap(functx.grad(loss))(numbers(3, 4))
        assert log == ["forward", "replay"]

    def test_are_not_entered_where_nothing_is_differentiated(self):
        log = []
        with torch.no_grad():
            functx.checkpoint(body, X, context_fn=self.contexts(log))
        assert not log

    def test_what_the_function_closes_over_is_found(self):
        scale, factor = X.clone().requires_grad_(), 2.0
        out = functx.checkpoint(lambda x: x * scale * factor, X, context_fn=self.contexts([]))
        factor = 5.0  # bound late; the replay sees what the forward saw
        out.sum().backward()
        assert_same(scale.grad, 2.0 * X)
        assert factor == 5.0

    def test_must_be_two(self):
        with pytest.raises(TypeError, match="two context managers"):
            functx.checkpoint(body, X, context_fn=lambda: None)

    def test_must_let_exceptions_pass(self):
        def fails(x):
            raise KeyError

        with pytest.raises(functx.RematError, match="suppressed"):
            functx.checkpoint(
                fails,
                X.clone().requires_grad_(),
                context_fn=lambda: (contextlib.suppress(KeyError), contextlib.nullcontext()),
            )


def of_products(context, op, *args, **kwargs):
    assert not context.is_recompute
    saved = op == torch.ops.aten.mm.default
    policies = theirs.CheckpointPolicy
    return policies.MUST_SAVE if saved else policies.PREFER_RECOMPUTE


OF_PRODUCTS = {
    "function": functools.partial(theirs.create_selective_checkpoint_contexts, of_products),
    "list": functools.partial(
        theirs.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
    ),
    "lambda": lambda: theirs.create_selective_checkpoint_contexts(of_products),
}


class TestSelective:
    """Contexts of ``create_selective_checkpoint_contexts`` are policies."""

    @staticmethod
    def loss(context_fn=theirs.noop_context_fn):
        w = numbers(4, 4)

        def layer(x):
            return torch.tanh(torch.sin(x @ w) @ w)

        def loss(x):
            return functx.checkpoint(layer, x, use_reentrant=False, context_fn=context_fn).sum()

        return loss

    @pytest.mark.parametrize("kind", OF_PRODUCTS)
    def test_products_are_not_computed_again(self, kind):
        x = numbers(3, 4)
        everything = count(gradients, self.loss(), x)
        saved = count(gradients, self.loss(OF_PRODUCTS[kind]), x)
        assert saved["mm"] < everything["mm"]
        assert saved["tanh"] == everything["tanh"]
        assert_same(gradients(self.loss(OF_PRODUCTS[kind]), x), gradients(self.loss(), x))

    @pytest.mark.parametrize("kind", OF_PRODUCTS)
    def test_under_transforms(self, kind):
        x = numbers(5, 3, 4)

        def per_example(loss):
            return functx.vmap(functx.grad(loss))(x)

        assert_same(per_example(self.loss(OF_PRODUCTS[kind])), per_example(self.loss()))


class TestSequential:
    @pytest.mark.parametrize("segments", [1, 2, 3, 5])
    @pytest.mark.parametrize("kind", ["functions", "modules"])
    def test_values_and_gradients(self, segments, kind):
        torch.manual_seed(0)
        chain = [torch.sin, torch.exp, torch.tanh, torch.sin, torch.cos]
        if kind == "modules":
            chain = nn.Sequential(*(nn.Linear(4, 4, dtype=DTYPE) for _ in chain))

        def ours(x):
            return functx.checkpoint_sequential(chain, segments, x, use_reentrant=False).sum()

        def plain(x):
            for f in chain:
                x = f(x)
            return x.sum()

        assert_same(gradients(ours, X), gradients(plain, X))
        batch = numbers(3, 4)
        assert_same(functx.vmap(functx.grad(ours))(batch), functx.vmap(functx.grad(plain))(batch))

    @pytest.mark.parametrize("segments", [1, 2, 3, 4, 7])
    def test_cuts_where_torch_cuts(self, segments):
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():
            return  # torch's own needs them
        chain = [torch.sin] * 7

        def replayed(sequential):
            x = X.clone().requires_grad_()
            out = sequential(chain, segments, x, use_reentrant=True, preserve_rng_state=False)
            return count(out.sum().backward)["sin"]

        assert replayed(functx.checkpoint_sequential) == replayed(theirs.checkpoint_sequential)

    def test_a_list_that_changes_later(self):
        chain = [torch.sin, torch.exp, torch.cos, torch.tanh]
        x = X.clone().requires_grad_()
        out = functx.checkpoint_sequential(chain, 2, x)
        chain[0] = torch.cos
        out.sum().backward()
        assert_same(
            x.grad, gradients(lambda x: torch.tanh(torch.cos(torch.exp(torch.sin(x)))).sum(), X)[0]
        )

    @pytest.mark.parametrize("segments", [0, -1, 4])
    def test_segments_out_of_range(self, segments):
        with pytest.raises(ValueError, match=r"segments is .* 3 functions: choose 1 to 3"):
            functx.checkpoint_sequential([torch.sin] * 3, segments, X)

    @pytest.mark.parametrize("segments", [1.5, True, None])
    def test_segments_that_are_no_number(self, segments):
        with pytest.raises(TypeError, match="segments"):
            functx.checkpoint_sequential([torch.sin] * 3, segments, X)

    def test_options_that_are_not_known(self):
        with pytest.raises(ValueError, match="Unexpected keyword arguments: nothing"):
            functx.checkpoint_sequential([torch.sin] * 3, 1, X, nothing=1)

    def test_options_are_passed_on(self):
        with pytest.raises(ValueError, match="determinism_check"):
            functx.checkpoint_sequential([torch.sin] * 3, 2, X, determinism_check="sometimes")

    def test_no_function(self):
        with pytest.raises(TypeError, match="Tensor"):
            functx.checkpoint_sequential([torch.sin, X], 1, X)
        assert functx.checkpoint_sequential([], 1, X) is X
