"""Code that torch.compile compiles is the same with and without `patch_checkpoint`.

The kind: whatever a compiler or tracer of torch makes of calls of ``torch.utils.checkpoint`` may
not depend on the patch, because its recompute is its own, and graphs are kept (in the compiled
function, and on disk) for use without the patch. So each program here is compiled without the patch
and under it, and everything is compared: the graphs that the partitioner returns, what they save,
values and gradients. The programs differ in how they call checkpoint (options, policies, nesting,
hooks, graph breaks) and in how they hold it (by name, in a partial, in a wrapper made earlier).
"""

import contextlib
import functools
import threading

import pytest
import torch
import torch.utils.checkpoint as theirs
from cases import numbers
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from references import assert_same
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential

import functx

aten = torch.ops.aten
X = numbers(3, 4)
HELD = functools.partial(checkpoint, use_reentrant=False)  # made while no patch is in place
BOTH = [contextlib.nullcontext, functx.patch_checkpoint]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.first, self.second, self.p = nn.Linear(4, 8).double(), nn.Linear(8, 4).double(), p

    def forward(self, x):
        return nn.functional.dropout(self.second(self.first(x).tanh()).sin(), self.p)


def plainly(block, x):
    return block(x)


class Net(nn.Module):
    """Blocks, each of which is called in a way of its own."""

    def __init__(self, *calls, p=0.0):
        super().__init__()
        self.calls = calls or (HELD, HELD)
        self.blocks = nn.ModuleList(Block(p) for _ in self.calls)

    def forward(self, x):
        for call, block in zip(self.calls, self.blocks, strict=True):
            x = call(block, x)
        return x.sum()


def by_name(**options):
    return lambda block, x: checkpoint(block, x, **{"use_reentrant": False, **options})


def policy(saved=(), otherwise=CheckpointPolicy.MUST_RECOMPUTE):
    def decide(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else otherwise

    return functools.partial(theirs.create_selective_checkpoint_contexts, decide)


OF_PRODUCTS = policy([aten.addmm.default, aten.mm.default], CheckpointPolicy.PREFER_RECOMPUTE)
OF_TANH = policy([aten.tanh.default])


def nested(block, x):
    return HELD(lambda x: HELD(block, x).cos(), x)


def broken(block, x):
    def body(x):
        y = block(x)
        torch._dynamo.graph_break()
        return y.exp()

    return HELD(body, x)


@torch.compiler.disable
def disabled(block, x):
    return HELD(block, x)


def chained(block, x):
    return checkpoint_sequential(
        [block, torch.cos, block.second.bias.add], 3, x, use_reentrant=False
    )


WAYS = {
    "by name": by_name(),
    "in a partial": HELD,
    "reentrant": by_name(use_reentrant=True),
    "no early stop": by_name(early_stop=False),
    "products saved": by_name(context_fn=OF_PRODUCTS),
    "all recomputed": by_name(context_fn=policy()),
    "tanh saved, all else recomputed": by_name(context_fn=OF_TANH),
    "nested": nested,
    "chained": chained,
    "functx.checkpoint": lambda block, x: functx.checkpoint(block, x, context_fn=OF_PRODUCTS),
    "functx.remat": lambda block, x: functx.remat(
        block, policy=functx.checkpoint_policies.dots_saveable
    )(x),
}


def in_every_way():
    return Net(*WAYS.values())


def with_dropout_and_hooks():
    net = Net(by_name(), by_name(use_reentrant=True), by_name(context_fn=OF_TANH), p=0.5)
    for block in net.blocks:
        block.register_forward_hook(lambda module, args, out: out * 2)
    return net


def wrapped_before():
    net = Net(plainly, plainly, p=0.5)
    for impl, block in zip(CheckpointImpl, [*net.blocks], strict=True):
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)
        apply_activation_checkpointing(net, wrapper, lambda module, block=block: module is block)
    return net


def with_graph_breaks():
    """Some parts of it run in eager."""
    net = Net(broken, disabled, HELD, p=0.5)
    net.blocks[2].first.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 3,))
    return net


class Graphs:
    """A backend that notes the graphs of forward and backward passes, and what these hand on."""

    def __init__(self):
        self.code, self.products, self.saved = [], [], []
        partition = min_cut_rematerialization_partition
        self.backend = aot_autograd(
            fw_compiler=self.note, bw_compiler=self.note, partition_fn=partition
        )

    def note(self, module, examples):
        calls = [n.target for n in module.graph.nodes if n.op == "call_function"]
        self.code.append(module.code)
        self.products.append(sum(op in (aten.mm.default, aten.addmm.default) for op in calls))
        (results,) = module.graph.find_nodes(op="output")
        self.saved.append(sum(n is not None and n.op == "call_function" for n in results.args[0]))
        return make_boxed_func(module.forward)


def compiled(make, context, xs=(X,), dynamic=None):
    """The graphs of a program, and the values and gradients that it computes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, graphs, found = make(), Graphs(), []
    run = torch.compile(net, backend=graphs.backend, dynamic=dynamic)
    with context():
        for x in xs:
            x = x.clone().requires_grad_()
            loss = run(x)
            loss.backward()
            found += [loss.detach(), x.grad]
    return graphs, [*found, *(p.grad for p in net.parameters())]


def assert_the_same(make, **options):
    (graphs, expected), (under, found) = (compiled(make, c, **options) for c in BOTH)
    assert under.code == graphs.code
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    return under


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks, at a break
@pytest.mark.parametrize(
    "make", [in_every_way, with_dropout_and_hooks, wrapped_before, with_graph_breaks]
)
def test_graphs_values_and_gradients_are_those_without_the_patch(make):
    assert_the_same(make)


def test_products_are_computed_again_and_what_they_give_is_not_saved():
    with functx.patch_checkpoint():
        plain, under, keeping = (
            compiled(lambda call=call: Net(call, call), contextlib.nullcontext)[0]
            for call in (plainly, HELD, by_name(context_fn=OF_PRODUCTS))
        )
    assert plain.products == keeping.products == [4, 8]
    assert under.products == [4, 8 + 4]
    assert under.saved[0] < plain.saved[0]


def test_dropout_has_one_mask_in_the_forward_and_the_recompute():
    f = lambda x: checkpoint(
        lambda x: nn.functional.dropout(x.exp(), 0.5).exp() - 1,
        x,
        use_reentrant=False,
        context_fn=policy([aten.exp.default]),
    )
    x = numbers(64, 64).requires_grad_()
    with functx.patch_checkpoint():
        out = torch.compile(f, backend="aot_eager")(x)
        out.sum().backward()
    assert torch.equal(x.grad != 0, out != 0)
    assert 0.4 < (out != 0).double().mean() < 0.6


def test_early_stop_that_is_off_around_the_call_is_off():
    with theirs.set_checkpoint_early_stop(False):
        under = assert_the_same(lambda: Net(HELD))
    assert len(under.code) == 2


def test_dynamic_sizes_are_those_without_the_patch():
    xs = [numbers(n, 4) for n in (3, 5)]
    under = assert_the_same(lambda: Net(HELD, p=0.5), xs=xs, dynamic=True)
    assert len(under.code) == 2


@pytest.mark.parametrize("first", BOTH)
def test_code_compiled_outside_serves_inside_and_the_other_way_round(first):
    graphs, net = Graphs(), Net()
    run = torch.compile(net, backend=graphs.backend, fullgraph=True)
    with first():
        run(X).backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        with functx.patch_checkpoint():
            run(X).backward()
        run(X).backward()
    assert len(graphs.code) == 2


def test_a_thread_that_compiles_under_the_patch_of_another_one():
    found = []
    with functx.patch_checkpoint():
        thread = threading.Thread(
            target=lambda: found.append(compiled(Net, contextlib.nullcontext))
        )
        thread.start()
        thread.join()
    assert found[0][0].code == compiled(Net, contextlib.nullcontext)[0].code


def test_the_eager_backend_runs_torch_s_checkpoint():
    with functx.patch_checkpoint():
        out = torch.compile(Net(), backend="eager", fullgraph=True)(X)
    nodes, names = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [n for n, _ in node.next_functions if n is not None]
    assert "TanhBackward0" in names
    assert "RegionNodeBackward" not in names


@pytest.mark.sweep  # inductor takes seconds
def test_graphs_that_inductor_has_on_disk_are_those_without_the_patch():
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    def saved(context):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with context():
            out = torch.compile(Net())(X)
            shapes = [t.shape for t in out.grad_fn.saved_tensors]
            out.backward()  # only then the graphs are written
        return shapes

    with fresh_cache():
        expected = saved(contextlib.nullcontext)
    with fresh_cache():
        assert saved(functx.patch_checkpoint) == expected
        before = counters["aot_autograd"]["autograd_cache_hit"]
        assert saved(contextlib.nullcontext) == expected
        assert counters["aot_autograd"]["autograd_cache_hit"] == before + 1


class TestTransforms:
    """Where torch's own checkpoint would raise, functx's runs, in eager or in the graph."""

    def case(self, net):
        parameters = {name: p.detach() for name, p in net.named_parameters()}
        loss = lambda parameters, x: functx.functional_call(net, parameters, (x,))
        plain = Net(plainly, plainly)
        expected = functx.grad(lambda ps: functx.functional_call(plain, ps, (X,)))(parameters)
        return parameters, loss, expected

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_gradients_of_compiled_functions(self, backend):
        parameters, loss, expected = self.case(Net())
        with functx.patch_checkpoint():
            found = functx.grad(torch.compile(loss, backend=backend))(parameters, X)
        assert_same(found, expected, eps=64)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_gradients_of_torch_func_inside_of_compiled_functions(self, backend):
        parameters, loss, expected = self.case(Net())
        with functx.patch_checkpoint():
            found = torch.compile(torch.func.grad(loss), backend=backend)(parameters, X)
        assert_same(found, expected, eps=64)

    def test_parts_that_are_not_compiled(self):
        net = Net(disabled, broken)
        parameters = {name: p.detach() for name, p in net.named_parameters()}
        run = torch.compile(net, backend="aot_eager")
        named = lambda ps: {f"_orig_mod.{name}": p for name, p in ps.items()}
        with functx.patch_checkpoint():
            found = functx.grad(lambda ps: functx.functional_call(run, named(ps), (X,)))(parameters)
        net.calls = (plainly, lambda block, x: block(x).exp())
        expected = functx.grad(lambda ps: functx.functional_call(net, ps, (X,)))(parameters)
        assert_same(found, expected, eps=64)


class TestOtherTracers:
    def test_export_is_as_without_the_patch_and_warns_of_nothing(self):
        def code(context):
            with context():
                return torch.export.export(Net(p=0.5), (X,), strict=False).graph_module.code

        assert code(functx.patch_checkpoint) == code(contextlib.nullcontext)

    @pytest.mark.filterwarnings("ignore:.torch.jit.trace")
    def test_jit_trace_is_as_without_the_patch_and_warns_of_nothing(self):
        def code(context):
            with context():
                return torch.jit.trace(Net(), (X,)).code

        assert code(functx.patch_checkpoint) == code(contextlib.nullcontext)

    def test_make_fx_computes_as_much_again_and_draws_once(self):
        """Its graph is functx's: torch's own has a second mask in the recompute."""

        def graph(context, p):
            net = Net(p=p)
            loss = lambda x: torch.autograd.grad(net(x), [*net.parameters()])
            with context():
                nodes = make_fx(loss)(X).graph.nodes
            return [n.target for n in nodes if n.op == "call_function"]

        products = lambda ops: sum(op in (aten.mm.default, aten.addmm.default) for op in ops)
        plain, under = (products(graph(context, 0.0)) for context in BOTH)
        assert under == plain
        assert graph(functx.patch_checkpoint, 0.5).count(aten.bernoulli_.float) == 2
