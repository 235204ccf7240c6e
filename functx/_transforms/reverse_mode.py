"""One level of reverse-mode differentiation: record a function, pull cotangents back afterwards.

NOTE [lean]
``torch.func.grad`` runs the backward pass *inside* the level that recorded the forward, with
``create_graph=True``: the level records its own backward, which nobody can ever read, and keeps
every gradient until it ends. Here the level ends first. Dead, it records nothing of the backward
pass, so each saved tensor goes as soon as its node has run; levels around it, and plain autograd
below them, record what they track, if grad mode is on where the transform was called.

``create_graph`` must not be read off the tensors at hand ("does the output require grad outside?"):
a hook or the backward of a custom Function may bring in a variable of an outer level that the
forward pass never saw, and its derivative would be silently zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import disable_saved_tensors_hooks

from functx import _torch
from functx._core import (
    function_classes,
    line_of,
    norm_derivatives,
    tree,
    uncompiled,
    unwrap_for_backward,
    validate,
    where,
)
from functx._remat import (
    StackGuard,
    asking_for,
    finish_interrupted,
    made_inside,
    sharding,
    taken_in,
)
from functx._torch import compiler, gradient_edge

# Whether `functx._models.patch` is in place, so that errors must not advise it.
checkpoint_is_patched = False

_NO_HOOKS = (
    "functx.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks, those of "
    "torch.utils.checkpoint and save_on_cpu. Use functx.patch_checkpoint() around a model that "
    "checkpoints itself; if apply_remat has made regions in it, switch its own checkpoints off "
    "instead (gradient_checkpointing_disable(), in diffusers disable_gradient_checkpointing()). In "
    "your own code use functx.remat(f)(*args), or functx.checkpoint(f, *args); in place of "
    "save_on_cpu, functx.remat(f, policy=checkpoint_policies.offload(policy))."
)
_OLD_FUNCTION = "override the setup_context"
# By words of an error of torch's: the way out.
_WAYS_OUT = {
    "support saved tensor hooks": _NO_HOOKS,
    "_NoopSaveInputs": _NO_HOOKS,  # of checkpoint, under vmap, before torch 2.13
    "Tensor.requires_grad_()": "functx's transforms allow requires_grad_(), but torch forbids it "
    "again after a backward pass inside of the function. Use functx.grad there, in place of "
    "torch.autograd.grad or torch.func.grad. If this is the hook of Hugging Face's "
    "gradient_checkpointing_enable(), which transforms don't need, you can remove it: "
    "model.disable_input_require_grads().",
    _OLD_FUNCTION: "If this is torch.utils.checkpoint with use_reentrant=True: call "
    "it under functx.patch_checkpoint(), or use functx.checkpoint.",
    "_scaled_dot_product_": "Fused attention has but first derivatives, in reverse mode: call it "
    "under torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH).",
    "from the 'SparseC": "vmap has no rules for sparse gradients. If they are those of "
    "nn.Embedding(sparse=True) or nn.EmbeddingBag: set its attribute sparse to False, or use "
    "functx.per_sample, whose gradients are dense.",
    "aten::embedding_renorm_": "nn.Embedding(max_norm=) writes to its weight, which vmap can't do "
    "for each example. functx.per_sample can: it looks rows up in a renormalised copy.",
    "'workspace'": "vmap can't run the pullback of nn.LSTM on a CPU: functx.per_sample takes "
    "chunk_size=1; its gram and jacobian need torch.backends.mkldnn.flags(enabled=False) as well.",
}
_HOOKS_UNDER_PATCH = (
    "functx.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks. Under "
    "functx.patch_checkpoint(), which is in place, torch.utils.checkpoint.checkpoint uses none, so "
    "these are others. Those of torch.distributed._composable.checkpoint(module): use "
    "functx.apply_remat(model, [module]) in its place, or checkpoint_wrapper(module) of "
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper. Those of save_on_cpu "
    "(offload=True in transformers): use "
    "functx.remat(f, policy=checkpoint_policies.offload(policy))."
)
_WAYS_OUT_UNDER_PATCH = {
    **{words: note for words, note in _WAYS_OUT.items() if "patch_checkpoint" not in note},
    "support saved tensor hooks": _HOOKS_UNDER_PATCH,
    "_NoopSaveInputs": _HOOKS_UNDER_PATCH,
}


@contextmanager
def ways_out() -> Iterator[None]:
    """Adds to an error of torch's what to do instead."""
    try:
        yield
    except RuntimeError as error:
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if sharding.is_of_dtensors(error):
            said = said.replace(_OLD_FUNCTION, "")
            if sharding.NO_TRANSFORM not in said:
                error.add_note(sharding.NO_TRANSFORM)
        notes = _WAYS_OUT_UNDER_PATCH if checkpoint_is_patched else _WAYS_OUT
        for words, note in notes.items():
            if words in said and note not in said:
                error.add_note(note)
        raise


class Pullback:
    """A recorded function, ready to take cotangents of its outputs to those of its inputs.

    What :func:`functx.vjp` returns as ``vjp_fn``. It keeps the residuals of the recorded function
    until it is dropped, or called with ``retain_graph=False``.
    """

    def __init__(self, inputs: Any, outputs: Any, spec: tree.TreeSpec) -> None:
        self.inputs, self.inputs_spec = tree.flatten(inputs)
        level = {*map(_torch.level_of, self.inputs)}  # what is of another depends on none of them
        # Edges, not the outputs: their memory is the caller's to keep.
        self._edges: list[Any] | None = [
            gradient_edge(out) if out.requires_grad and _torch.level_of(out) in level else None
            for out in outputs
        ]
        self._outputs_spec = spec
        self.watch: sharding.Watch | None = None  # of what the function called

    def is_zero(self) -> bool:
        """Whether the recorded function depends on none of the inputs, as far as its tape goes."""
        return all(edge is None for edge in self._edges or ())

    @uncompiled
    def __call__(
        self, cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None
    ) -> Any:
        """The cotangents of the inputs, a pytree like the primals.

        Args:
            cotangents: A pytree like the function's output, of tensors of the same shapes.
            retain_graph: Keep the residuals, so that the pullback can be called again. With
                ``False`` each goes as soon as it has been read.
            create_graph: Let the levels around the transform, and plain autograd, record the
                pullback, so that it can itself be differentiated. By default if grad mode is on.

        Raises:
            RuntimeError: ``cotangents`` has another structure than the output, or the residuals
                are gone.
        """
        gradients = self._pull(cotangents, retain_graph, create_graph)
        # A backward that hands a saved tensor on as it is hands on a wrapper of the dead level.
        alive = [_torch.alive(gradient) for gradient in gradients]
        if self.watch is not None and self.watch.met:
            alive = sharding.pulled_once(alive)
        return tree.unflatten(self.inputs_spec, made_inside(alive))

    def feed(self, cotangents: Any, receive: Callable[[int, torch.Tensor], None]) -> None:
        """Hands over each leaf's gradient, once summed over all uses, with its number; keeps none.

        A leaf that the outputs do not depend on may get none.
        """
        with ExitStack() as hooks:
            for leaf, tensor in enumerate(self.inputs):
                hooks.callback(tensor.register_hook(partial(_hand_over, receive, leaf)).remove)
            self._pull(cotangents, retain_graph=False)

    def _pull(
        self, cotangents: Any, retain_graph: bool, create_graph: bool | None = None
    ) -> Sequence[torch.Tensor]:
        flat, spec = tree.flatten(cotangents)
        if spec != self._outputs_spec:
            raise RuntimeError(
                "Expected pytree structure of cotangents to be the same as pytree structure of "
                f"outputs to the function. cotangents: {spec}, primal output: {self._outputs_spec}"
            )
        if self._edges is None:
            raise RuntimeError(
                "vjp_fn: the residuals are gone, because an earlier call passed "
                "retain_graph=False; leave it out in all calls but the last"
            )
        through_fsdp: Any = nullcontext()
        if self.watch is not None and self.watch.met:
            self.watch.check_pulled_back()
            through_fsdp = sharding.own_pullback()
        inputs = self.inputs
        taped = [(edge, c) for edge, c in zip(self._edges, flat) if edge is not None]
        if not retain_graph:
            self._edges = None
        found: Sequence[torch.Tensor | None] = [None] * len(inputs)
        try:
            with (
                through_fsdp,
                ways_out(),
                _outside_inference_mode(),
                compiler.without_compiled_autograd(),
                _torch.RequiresGradAllowed(),  # puts the flag back, which the engine clears
                asking_for(inputs),
            ):
                if taped and inputs:
                    found = torch.autograd.grad(
                        [edge for edge, _ in taped],
                        inputs,
                        [cotangent for _, cotangent in taped],
                        retain_graph=retain_graph,
                        create_graph=torch.is_grad_enabled()
                        if create_graph is None
                        else create_graph,
                        allow_unused=True,
                    )
                return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found)]
        except BaseException:
            finish_interrupted()
            raise


def _hand_over(receive: Callable[..., None], leaf: int, gradient: torch.Tensor) -> torch.Tensor:
    """A hook that gives a gradient away, and the engine zeros without memory to speak of."""
    receive(leaf, *made_inside([_torch.alive(gradient)]))
    if gradient.layout is not torch.strided:
        return torch.zeros_like(gradient)
    return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)


def record(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: validate.Argnums,
    *,
    has_aux: bool,
    api: str,
    check_output: Callable[[Any], None] | None = None,
    once: bool = False,
) -> tuple[Any, Any, Pullback]:
    """Runs ``func`` in a grad level of its own, which has ended when this returns.

    Arguments are pytrees of anything; those that ``argnums`` names are differentiated.
    ``check_output`` looks at the output inside the level; by default all of it must be tensors that
    can have derivatives. ``once`` says that the pullback is called once, and not under ``vmap``.

    Returns:
        The output, the auxiliary output or ``None``, and the pullback to the argument, or the tuple
        of them, that is differentiated.
    """
    positions = validate.resolve_argnums(argnums, len(args), api)
    validate.check_inputs(args, positions, api)
    args, kwargs = taken_in(api, (args, kwargs))
    norms = norm_derivatives.around((args, kwargs), once=once)  # asked for outside of the new level
    entry = StackGuard(None)
    try:
        with (
            _hooks_disabled(),
            _outside_inference_mode(),
            sharding.watching(api) as watch,
            _torch.grad_level() as level,
            torch.enable_grad(),
        ):
            if watch is not None:
                watch.level = level
            made: list[torch.Tensor] = []

            def enter(leaf: Any) -> Any:
                return _torch.wrap_grad(_torch.alive(leaf), level) if tree.is_tensor(leaf) else leaf

            def leave(leaf: Any) -> Any:
                value = _torch.unwrap_grad(leaf, level) if isinstance(leaf, torch.Tensor) else leaf
                if value is not leaf:  # else it is of nobody here, and passed on as it is
                    made.append(value)
                return value

            classes = function_classes()
            args, kwargs = tree.map_(enter, (args, kwargs))
            inputs = tuple(args[position] for position in positions)
            for leaf in tree.leaves(inputs):
                _torch.require_grad(leaf)
            with norms:
                output, aux = func(*args, **kwargs), None
            if has_aux:
                output, aux = validate.split_aux(output, api)
            (check_output or partial(validate.check_outputs, api=api))(output)
            flat_output, spec = tree.flatten(output)
            one = isinstance(argnums, int)
            pullback = Pullback(inputs[0] if one else inputs, flat_output, spec)
            _check_nothing_lost(pullback, api)
            pullback.watch = watch
            unwrap_for_backward(flat_output, classes)
            output, aux = tree.map_(leave, output), tree.map_(leave, aux)
            made_inside(made)
            return output, aux, pullback
    except BaseException:
        entry.failed()
        raise


def _check_nothing_lost(pullback: Pullback, api: str) -> None:
    """Looks for gradients that the function itself has dropped, which would come out as zeros."""
    if not all(map(_requires_grad, pullback.inputs)):
        raise RuntimeError(
            f"{api}: the function has switched requires_grad off for an argument that is "
            "differentiated, by requires_grad_(False) or by assignment, so its gradient would be "
            "zeros. Leave it on, and differentiate with respect to fewer arguments (argnums=)."
        )
    # The engine clears the flag, and functx puts it back after backward passes of its own.
    if not _torch.requires_grad_is_allowed() and pullback.is_zero():
        file, line, _ = line_of(where())
        message = (
            f"{api}: all derivatives are zeros. The output depends on none of the differentiated "
            "arguments, and the function has run a backward pass: without create_graph=True its "
            "results are constants. Pass torch.autograd.grad(..., create_graph=True), or call "
            "functx.grad in its place."
        )
        warnings.warn_explicit(message, RuntimeWarning, file, line)


_requires_grad = attrgetter("requires_grad")


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Leaves inference mode, in which nothing can record, and grad mode as it is."""
    grad, inferring = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if inferring else nullcontext(), torch.set_grad_enabled(grad):
        yield


@contextmanager
def _hooks_disabled() -> Iterator[None]:
    """No saved-tensor hooks inside: an error says what to use instead."""
    message = _HOOKS_UNDER_PATCH if checkpoint_is_patched else _NO_HOOKS
    with ways_out(), disable_saved_tensors_hooks(message), _torch.RequiresGradAllowed():
        yield
