"""Handles the tensors that a trace meets, and refuses what a graph can't do to them.

NOTE [stand-ins]
A tensor that the function captures (J2) has hooks, a tape and values, and none of these belong into
a graph. So when an operator gets a captured tensor, a function mode replaces it by a *stand-in*: a
fake tensor that is an input of the graph, and a leaf without hooks. Python code still sees the
captured tensor itself, so that ``a is b``, ``isinstance(w, nn.Parameter)`` and dicts keyed by
tensors work. Some code bypasses function modes: ``Function.apply``, transforms, and the nodes of
regions. It computes with the captured tensor itself, which is then on the tape. So `operation` asks
for the gradients of both, and adds them.

The same mode refuses operations that a graph can't do (J4), before they happen. It also notes
in-place changes of the shape of an argument, which must be repeated after each call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from functx import _torch
from functx._compile.intact import RefusedChanges
from functx._compile.search import PLAIN
from functx._core import TracingError, is_internal, line_now
from functx._remat import tape_of
from functx._torch import graphs

_A: Any = Tensor  # ``Any``, since type checkers don't know attributes as descriptors
# Operators go by name here, since they come as methods, functions and overloads.
_RESHAPES = {"unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_"}
_OTHER_CHANGES = {"resize_", "resize_as_", "set_", "detach_", "share_memory_", "as_strided_"}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
_VALUES = {
    *("tolist", "numpy", "data_ptr", "__array__", "__dlpack__", "storage", "untyped_storage"),
    *("__reduce_ex__", "pin_memory"),
}
_STORAGES = {"storage", "untyped_storage", "data_ptr"}
_GRAD = {_A.grad.__get__}
_LEAFNESS = {_A.is_leaf.__get__, _A.grad_fn.__get__}
_BITS = {Tensor.is_conj, Tensor.is_neg}
_OFFSET = Tensor.storage_offset
_VERSION = {_A._version.__get__}
_OF_DEFAULT_GENERATORS = {"exponential_", "log_normal_", "geometric_", "cauchy_"}
_OF_C = frozenset({type(torch.sin), type(Tensor.sin), type(_A.grad.__get__)})
_PLAIN_ARGUMENTS = PLAIN | {
    *(Tensor, nn.Parameter, _torch.FakeTensor, torch.Size, torch.SymInt, torch.SymFloat),
    *(torch.SymBool, torch.Generator),
}


def is_leaf(t: Tensor) -> bool:
    """Whether the tensor is a leaf of the tape."""
    return t.is_leaf


def has_gradient(t: Tensor) -> bool:
    """Whether ``.grad`` of the tensor is set."""
    return t.is_leaf and t.grad is not None


def has_hooks(t: Tensor) -> bool:
    """Whether the tensor has hooks for its gradient."""
    return bool(t._backward_hooks)


class Exchange(RefusedChanges):
    """Replaces captured tensors by stand-ins; see NOTE [stand-ins].

    Args:
        captured: The tensors that a search has found.
        standin: Returns the stand-in of the captured tensor with a given number.
        given: The arguments in the trace.
    """

    def __init__(
        self, captured: Sequence[Tensor], standin: Callable[[int], Tensor], given: Sequence[Tensor]
    ) -> None:
        super().__init__([*captured, *given])
        self._standin = standin
        self.numbers = {id(t): i for i, t in enumerate(captured)}
        self.hooked: list[Tensor] = []  # tensors of the trace on which the function set a hook
        self._computed: dict[int, Tensor] = {}  # used captured tensors that are not leaves
        # Questions that the trace has asked about captured tensors, by number, and the answers.
        # Each later call must give the same answers, or the graph is not valid for it.
        self.asked: dict[tuple[int, Callable[[Tensor], Any]], Any] = {}

    def standin(self, t: Tensor) -> Tensor:
        """Return the stand-in of a captured tensor, and any other tensor unchanged."""
        number = self.numbers.get(id(t))
        if number is None:
            return self._not_found(t)
        if t.grad_fn is not None:
            self._computed[number] = t
        return self._standin(number)

    def _is_below(self, t: Tensor) -> bool:
        """Whether another used captured tensor was computed from ``t`` outside."""
        others = [other for other in self._computed.values() if other is not t]
        nodes = {*tape_of(others, 0)} if others else set()
        leaves = {id(getattr(node, "variable", None)) for node in nodes}
        return id(t) in leaves or (t.grad_fn is not None and t.grad_fn in nodes)

    def _not_found(self, t: Tensor) -> Tensor:
        return t

    def ask(self, question: Callable[[Tensor], Any], t: Tensor) -> Any:
        """Answer a question about a captured tensor, and note it as a condition of the graph."""
        answer = self.asked[self.numbers[id(t)], question] = question(t)
        return answer

    def _exchanged(self, x: Any) -> Any:
        kind = type(x)
        if issubclass(kind, Tensor):
            return self.standin(x)
        if kind is tuple or kind is list:
            return kind([self._exchanged(v) for v in x])
        if kind is dict:
            return {k: self._exchanged(v) for k, v in x.items()}
        return x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad:
            return self._gradients(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        exchanged = [self._exchanged(a) for a in args]
        options = {k: self._exchanged(v) for k, v in kwargs.items()}
        if type(func) in _OF_C and _runs_no_code(types, exchanged, options):
            result = graphs.unnoted(func, exchanged, options)
        else:
            result = func(*exchanged, **options)
        if isinstance(result, Tensor):  # `w.add_(1)` must return w, not its stand-in
            pairs = (*zip(args, exchanged), *zip(kwargs.values(), options.values()))
            return next((a for a, b in pairs if b is result), result)
        return result

    def _gradients(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.autograd.grad`` inside the function, for captured tensors and their stand-ins."""
        single = isinstance(inputs, Tensor)
        wanted = [inputs] if single else [*inputs]
        mine = [isinstance(t, Tensor) and id(t) in self.numbers for t in wanted]
        for t, is_mine in zip(wanted, mine):
            if is_mine and self.ask(has_hooks, t):
                raise refused(
                    "takes a gradient with respect to a captured tensor that has hooks",
                    "Pass the tensor as an argument, or remove the hooks.",
                )
            if is_mine and self._is_below(t):
                raise refused(
                    "takes a gradient with respect to a captured tensor from which another "
                    "captured tensor was computed outside",
                    "Compute the other one in the function, or pass it as an argument.",
                )
        outputs, args, kwargs = (self._exchanged(x) for x in (outputs, args, kwargs))
        if not any(mine):
            return torch.autograd.grad(outputs, inputs, *args, **kwargs)
        both = [self._exchanged(t) for t in wanted]
        both += [t for t, is_mine in zip(wanted, mine) if is_mine]
        names = ("grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
        options = {**dict(zip(names, args)), **kwargs}
        unused = options.pop("allow_unused", None) or options.get("materialize_grads", False)
        materialize = options.pop("materialize_grads", False)
        found = [*torch.autograd.grad(outputs, both, allow_unused=True, **options)]
        rest = iter(found[len(wanted) :])
        found = [_sum(g, next(rest)) if is_mine else g for g, is_mine in zip(found, mine)]
        if not unused and any(g is None for g in found):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )
        if materialize:
            pairs = zip(wanted, found)
            found = [torch.zeros_like(self.standin(t)) if g is None else g for t, g in pairs]
        return (*found,)


class Met(Exchange):
    """Replaces captured tensors, and refuses operations on outside tensors that a graph can't do.

    Args:
        captured: The tensors that a search has found.
        standin: Returns the stand-in of the captured tensor with a given number.
        given: The arguments in the trace.
        arguments: The arguments of the call, if they are at hand.
        generators: The generators that the search has found, and those among the arguments.
        inside: Whether the call is inside of a transform.
    """

    def __init__(
        self,
        captured: Sequence[Tensor],
        standin: Callable[[int], Tensor],
        given: Sequence[Tensor],
        arguments: Sequence[Tensor],
        generators: Iterable[torch.Generator],
        inside: bool,
    ) -> None:
        super().__init__(captured, standin, given)
        self._real, self._inside = arguments, inside
        self._arguments = {id(t): i for i, t in enumerate(given) if id(t) not in self.numbers}
        self._generators = {id(g) for g in generators}
        # In-place changes of shape: the number of the argument, the function, its other arguments.
        self.reshaped: list[tuple[int, Any, Any, Any]] = []
        self.asked_leafness = self.asked_offset = self.asked_gradients = False

    def standin(self, t: Tensor) -> Tensor:
        """The stand-in of a captured tensor, except while a plan inside makes its own trace."""
        return t if _torch.proxy_mode() is None else super().standin(t)

    def _not_found(self, t: Tensor) -> Tensor:
        if self._inside and _torch.is_wrapped(t):
            self._check_level(t)
        return t

    def _check_level(self, t: Tensor) -> None:
        value = t
        while _torch.is_wrapped(value):
            value = _torch.inner_of(value)
        if not isinstance(value, _torch.FakeTensor) and id(value) not in self.numbers:
            raise refused(
                "reads a tensor of an enclosing transform that functx.jit can't find again at the "
                "next call",
                "Pass it as an argument.",
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (said := self._refused(func, args, kwargs)) is not None:
            raise graphs.note_refusal(
                TracingError(f"functx.jit: at {line_now()} the function {said}.")
            )
        if args and isinstance(args[0], Tensor):
            self._check(func, args, kwargs)
            if func in _LEAFNESS and id(args[0]) in self.numbers:
                self.ask(is_leaf, args[0])
                return func(*args)  # the answer for the captured tensor itself, not its stand-in
            if func in _BITS and self._real and id(args[0]) in self._arguments:
                return func(self._real[self._arguments[id(args[0])]])
            if func is Tensor.__deepcopy__:
                return self._copied(args[0])
        if (generator := kwargs.get("generator")) is not None:
            self._check_generator(generator, func)
        if isinstance(out := kwargs.get("out"), Tensor):
            return self._written(out, func, types, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def _written(self, out: Tensor, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator that writes to ``out``, and may give it another shape."""
        given = self.standin(out)
        is_input, shape = given is not out or id(out) in self._arguments, given.shape
        result = super().__torch_function__(func, types, args, kwargs)
        if is_input and given.shape != shape:
            raise refused(
                f"resizes a tensor of shape {(*shape,)} by out=",
                "Give a tensor of the right shape.",
            )
        return result

    def _copied(self, t: Tensor) -> Tensor:
        """``copy.deepcopy`` of a tensor as a clone: a fake tensor has no values to copy."""
        copy = self.standin(t).detach().clone()
        return copy.requires_grad_(t.requires_grad)

    # -- refusals

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        t, name = args[0], _name(func)
        if name in _VALUES:
            self._check_values(name, t)
        is_captured, number = id(t) in self.numbers, self._arguments.get(id(t))
        if not is_captured and number is None:
            if name in _HOOKS:
                self.hooked.append(t)
            return
        what = "a captured tensor" if is_captured else "an argument"
        if name in _RESHAPES and number is not None:
            self.reshaped.append((number, func, args[1:], kwargs))
        elif name in _OTHER_CHANGES:
            raise refused(
                f"changes {what} itself, not only its values, by {name}() or the like",
                "Do it outside, or on a copy.",
            )
        elif name in _HOOKS or func is _A._backward_hooks.__set__:
            raise refused(
                f"registers a hook on {what} ({name}), which would add one hook for each trace",
                "Register it outside, or on a view of the tensor (x.view_as(x)).",
            )
        elif name == "retain_grad" and not t.is_leaf:
            raise refused(f"calls retain_grad of {what}", "Call it outside.")
        elif func in _GRAD:
            self._check_gradient(t, number)
        elif func in _LEAFNESS:
            self.asked_leafness = True
        elif func is _OFFSET:
            self.asked_offset = True
        elif func in _VERSION and _is_called_by_the_user():
            raise refused("reads _version of a tensor", "Do that outside.")

    def _check_gradient(self, t: Tensor, number: int | None) -> None:
        """Refuse to read ``.grad`` if it is set; that it is not set becomes a guard."""
        real = t if number is None else (self._real[number] if self._real else t)
        if real.is_leaf and real.grad is not None:
            raise refused(
                "reads .grad of a tensor, as an optimizer's step() does",
                "Call step() outside, or pass the gradients as arguments.",
            )
        if number is None:
            self.ask(has_gradient, t)
        else:
            self.asked_gradients = True

    def _check_values(self, name: str, t: Tensor) -> None:
        if name not in _STORAGES:
            raise refused(
                f"reads the value of a tensor in Python ({name})",
                "Compute with the tensor (torch.where, masks), or pass the value as an argument "
                "that is not a tensor.",
            )
        is_input = id(t) in self.numbers or id(t) in self._arguments
        if is_input and _is_called_by_the_user():
            raise refused(f"takes the storage of a tensor ({name})", "Do that outside.")

    def _check_generator(self, generator: Any, func: Any) -> None:
        if _name(func) in _OF_DEFAULT_GENERATORS:
            raise refused(
                f"calls {_name(func)} with a torch.Generator, which torch's compilers can't do",
                "Draw from the default generator, or with torch.rand and torch.randn.",
            )
        if isinstance(generator, torch.Generator) and id(generator) not in self._generators:
            raise refused(
                "draws from a torch.Generator that it makes, or that functx.jit can't find again",
                "Make the generator outside the function, and pass or capture it.",
            )


def refused(what: str, remedy: str) -> TracingError:
    """An error that names the line, the operation there, and a remedy."""
    error = TracingError(
        f"functx.jit: at {line_now()} the function {what}. A graph can't do that (J4). {remedy}"
    )
    graphs.note_refusal(error)
    return error


def _name(func: Any) -> str:
    """The name of an operator or a method, without its overload."""
    return str(getattr(func, "_opname", None) or getattr(func, "__name__", ""))


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one + other


_TORCH = (torch.__file__.removesuffix("__init__.py"), contextlib.__file__)


def _is_called_by_the_user() -> bool:
    """Whether user code made this call, perhaps through torch, rather than functx."""
    frame = sys._getframe(1)
    skipped = (*_TORCH, __file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return not is_internal(frame.f_code.co_filename)


def _runs_no_code(types: Iterable[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a C function runs no Python code of the user when called with these arguments.

    Objects of user classes may run code to convert themselves (``__index__``), and saved-tensor
    hooks run in the forward.
    """
    if not _PLAIN_ARGUMENTS.issuperset(types):
        return False
    for x in (*args, *kwargs.values()):
        kind = type(x)
        if kind in (list, tuple):
            if not _PLAIN_ARGUMENTS.issuperset(map(type, x)):
                return False
        elif kind not in _PLAIN_ARGUMENTS:
            return False
    return _torch.top_saved_tensor_hooks(True) is None


def twin(t: Tensor) -> Tensor:
    """A fake tensor that the current trace takes for the tensor ``t``."""
    return graphs.same_value(t, lambda: graphs.fake_of(t))
