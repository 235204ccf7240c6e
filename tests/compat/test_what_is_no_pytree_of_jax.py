"""Arguments that are torch's are not taken apart by JAX, which loses stack where it fails.

The kind: jaxlib counts how deep it is, and after an exception it does not count back; a process
that has lost its count has no stack left. Members: each entry point with a container that holds
itself, in each kind of container; the same exception many times over; dicts whose keys can't be
sorted, which are no error for torch; and classes that JAX knows and can't take apart.
"""

import json
import subprocess
import sys
import textwrap

import pytest

# Runs in a process of its own: one that has lost its stack can't say so.
PROGRAM = """
import json
import jax, jax.numpy as jnp, torch, functx
from functx.compat import crosscheck, from_jax, to_jax


def frames():
    count = 0

    def deeper():
        nonlocal count
        count += 1
        deeper()

    try:
        deeper()
    except RecursionError:
        return count


class Unopened:
    pass


def fails(x):
    raise ValueError


class Held:
    def __init__(self, x):
        self.x = x


class Endless(Held):
    pass


jax.tree_util.register_pytree_node(Unopened, fails, fails)
jax.tree_util.register_pytree_node(Held, lambda h: ((h.x,), None), lambda _, xs: Held(*xs))
jax.tree_util.register_pytree_node(Endless, lambda h: ((h.x,), None), lambda _, xs: Held(*xs))
x, y = torch.ones(3), torch.ones(3, requires_grad=True)
first = lambda x, *_, **__: x.sin().sum()
ENTRIES = {
    "grad": lambda o: functx.grad(first)(x, o),
    "value_and_grad": lambda o: functx.value_and_grad(first)(x, o),
    "aux": lambda o: functx.grad(lambda x: (x.sum(), o), has_aux=True)(x),
    "vjp": lambda o: functx.vjp(lambda x, o: first(x), x, o),
    "jvp": lambda o: functx.jvp(lambda x, o: first(x), (x, o), (x, o)),
    "linearize": lambda o: functx.linearize(lambda x, o: first(x), x, o),
    "vmap": lambda o: functx.vmap(first, (0, None))(x, o),
    "jacrev": lambda o: functx.jacrev(first)(x, o),
    "jacfwd": lambda o: functx.jacfwd(first)(x, o),
    "hessian": lambda o: functx.hessian(first)(x, o),
    "remat": lambda o: functx.remat(first)(y, o),
    "remat by keyword": lambda o: functx.remat(first)(y, o=o),
    "result of a region": lambda o: functx.remat(lambda y: (y.sin(), o))(y),
    "checkpoint": lambda o: functx.checkpoint(first, y, o),
    "budget": lambda o: functx.remat(first, budget=1 << 20)(y, o),
    "plan": lambda o: functx.plan(first, y, o, budget=1 << 20),
    "scan": lambda o: functx.remat_scan(lambda c, x: (c, x), (x, o), x),
    "jit": lambda o: functx.jit(first, backend="eager")(x, o),
    "saved_residuals": lambda o: functx.saved_residuals(first, y, o),
    "per_sample": lambda o: functx.per_sample.grads(lambda w, x, o: (w * x).sum())(x, x, o),
    "checkpoint_name": lambda o: functx.checkpoint_name((y, o), "name"),
    "from_jax": lambda o: from_jax(lambda x, o: jnp.sum(x))(x, o),
    "to_jax": lambda o: to_jax(first)(jnp.ones(3), o),
    "result of to_jax": lambda o: to_jax(lambda x: (x, o))(jnp.ones(3)),
    "grad in JAX": lambda o: functx.grad(lambda x, o: jnp.sum(x))(jnp.ones(3), o),
    "remat in JAX": lambda o: functx.remat(lambda x, o: jnp.sum(x))(jnp.ones(3), o),
}
items, named, deep = [1], {}, [1]
items.append(items)
named["self"] = (1, named)
for _ in range(5000):
    deep = [deep]
ENDLESS = {"list": items, "dict": named, "nested": ({"a": [items]},), "deep": deep}
before, found = frames(), {}
for entry, run in ENTRIES.items():
    for kind, o in ENDLESS.items():
        try:
            found[entry, kind] = f"returned {type(run(o)).__name__}"
        except RecursionError as error:
            found[entry, kind] = str(error)
report = {"endless": [list(k) for k, v in found.items() if "contains itself" not in v]}
report["lost in endless"] = before - frames()

value = torch.ones(())
WELCOME = {"keys": {1: value, "a": value}, "a class": Unopened(), "in a dict": {1: Unopened()}}
report["refused"] = []
for entry in ("grad", "vmap", "remat", "jacrev", "saved_residuals", "checkpoint"):
    for kind, o in WELCOME.items():
        try:
            for _ in range(5):
                ENTRIES[entry](o)
        except Exception as error:
            report["refused"].append([entry, kind, repr(error)])
report["lost in what is welcome"] = before - frames()

endless = Endless(None)
endless.x = [endless]
try:
    ENTRIES["grad"](endless)
    report["endless class"] = "returned"
except RecursionError:
    report["endless class"] = "RecursionError"
report["lost in a class"] = before - frames()
report["held"] = functx.grad(lambda x, h: jnp.sum(x * h.x))(jnp.ones(2), Held(jnp.ones(2))).tolist()
report["held alone"] = functx.vmap(lambda h: jnp.sum(h.x))(Held(jnp.ones((2, 3)))).tolist()
try:
    functx.grad(first)(x, Held({"a": jnp.ones(2)}))
except TypeError as error:
    report["both"] = str(error)
report["closed over"] = functx.grad(lambda x: x.sum() + len(items))(x).tolist()
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_container_that_holds_itself_is_refused_in_words(report):
    assert report["endless"] == []
    assert report["endless class"] == "RecursionError"
    assert report["closed over"] == [1, 1, 1]


@pytest.mark.parametrize("where", ["endless", "what is welcome", "a class"])
def test_no_stack_is_lost(report, where):
    assert report[f"lost in {where}"] == 0


def test_what_torch_takes_and_jax_does_not_is_taken(report):
    assert report["refused"] == []


def test_arrays_in_classes_that_jax_alone_knows_are_found(report):
    assert (report["held"], report["held alone"]) == ([1, 1], [3, 3])
    assert "args[0] is a torch tensor, args[1][0]['a'] is a JAX array" in report["both"]
