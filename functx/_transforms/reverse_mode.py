"""One level of reverse mode: record a function, end the level, and pull cotangents back afterwards.

NOTE [lean]
``torch.func.grad`` runs the backward pass *inside* the level that recorded the forward, with
``create_graph=True``. So the level records its own backward, although nothing can read that record,
and keeps every gradient until it ends. functx ends the level first. An ended level does not record
the backward pass, so each saved tensor is freed as soon as its node has run. Outer levels, and
plain autograd below them, record what they track, if grad mode is on where the transform was
called.

``create_graph`` must not be decided by the tensors at hand ("does the output require grad in an
outer level?"). A hook or the backward of a custom Function may use a variable of an outer level
that the forward pass never saw. Its derivative would be silently zero.
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

# Whether `functx._models.patch` is in place. If so, errors must not recommend it.
checkpoint_is_patched = False

_NO_HOOKS = (
    "functx.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks, which "
    "torch.utils.checkpoint and save_on_cpu use. If a model checkpoints itself, call it under "
    "functx.patch_checkpoint(). If apply_remat was applied to the model, turn its own checkpoints "
    "off instead (gradient_checkpointing_disable(), or in diffusers "
    "disable_gradient_checkpointing()). In your own code, use functx.remat(f)(*args) or "
    "functx.checkpoint(f, *args); instead of save_on_cpu, use "
    "functx.remat(f, policy=checkpoint_policies.offload(policy))."
)
_OLD_FUNCTION = "override the setup_context"
# Advice on errors of torch. The key is a part of torch's message.
_REMEDIES = {
    "support saved tensor hooks": _NO_HOOKS,
    "_NoopSaveInputs": _NO_HOOKS,  # of checkpoint, under vmap, before torch 2.13
    "Tensor.requires_grad_()": "functx's transforms allow requires_grad_(), but torch forbids it "
    "again after a backward pass inside the function. Use functx.grad there, instead of "
    "torch.autograd.grad or torch.func.grad. If this is the hook of Hugging Face's "
    "gradient_checkpointing_enable(), which transforms don't need, you can remove it: "
    "model.disable_input_require_grads().",
    _OLD_FUNCTION: "If this is torch.utils.checkpoint with use_reentrant=True, call it under "
    "functx.patch_checkpoint(), or use functx.checkpoint.",
    "_scaled_dot_product_": "Fused attention has only first derivatives, in reverse mode. For "
    "others, call it under "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH).",
    "from the 'SparseC": "vmap has no rules for sparse gradients. If nn.Embedding(sparse=True) or "
    "nn.EmbeddingBag made them, set its attribute sparse to False, or use functx.per_sample, whose "
    "gradients are dense.",
    "aten::embedding_renorm_": "nn.Embedding(max_norm=) writes to its weight, which vmap can't do "
    "for each example. functx.per_sample supports it: it looks rows up in a renormalised copy.",
    "'workspace'": "vmap can't run the pullback of nn.LSTM on a CPU. Use functx.per_sample with "
    "chunk_size=1; its gram and jacobian need torch.backends.mkldnn.flags(enabled=False) as well.",
}
_HOOKS_UNDER_PATCH = (
    "functx.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks. "
    "functx.patch_checkpoint() is in place, so these hooks are not those of "
    "torch.utils.checkpoint.checkpoint. If they are those of "
    "torch.distributed._composable.checkpoint(module), use functx.apply_remat(model, [module]) "
    "instead, or checkpoint_wrapper(module) of "
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper. If they are those of save_on_cpu "
    "(offload=True in transformers), use "
    "functx.remat(f, policy=checkpoint_policies.offload(policy))."
)
_REMEDIES_UNDER_PATCH = {
    **{words: note for words, note in _REMEDIES.items() if "patch_checkpoint" not in note},
    "support saved tensor hooks": _HOOKS_UNDER_PATCH,
    "_NoopSaveInputs": _HOOKS_UNDER_PATCH,
}


@contextmanager
def adding_remedies() -> Iterator[None]:
    """A context that adds a note with the remedy to errors of torch."""
    try:
        yield
    except RuntimeError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if sharding.is_of_dtensors(error):
            text = text.replace(_OLD_FUNCTION, "")
            if sharding.NO_TRANSFORM not in text:
                error.add_note(sharding.NO_TRANSFORM)
        notes = _REMEDIES_UNDER_PATCH if checkpoint_is_patched else _REMEDIES
        for words, note in notes.items():
            if words in text and note not in text:
                error.add_note(note)
        raise


class Pullback:
    """Maps cotangents of the outputs of a recorded function to cotangents of its inputs.

    :func:`functx.vjp` returns it as ``vjp_fn``. It keeps the residuals of the recorded function
    until it is freed, or called with ``retain_graph=False``.
    """

    def __init__(self, inputs: Any, outputs: Any, spec: tree.TreeSpec) -> None:
        self.inputs, self.inputs_spec = tree.flatten(inputs)
        # An output of another level depends on none of the inputs.
        level = {*map(_torch.level_of, self.inputs)}
        # Keep gradient edges, not the outputs, whose memory the caller may want to free.
        self._edges: list[Any] | None = [
            gradient_edge(out) if out.requires_grad and _torch.level_of(out) in level else None
            for out in outputs
        ]
        self._outputs_spec = spec
        self.watch: sharding.Watch | None = None  # sees whether the function used sharded tensors

    def is_zero(self) -> bool:
        """Whether no output of the recorded function depends on the inputs."""
        return all(edge is None for edge in self._edges or ())

    @uncompiled
    def __call__(
        self, cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None
    ) -> Any:
        """The cotangents of the inputs, a pytree like the primals.

        Args:
            cotangents: A pytree like the function's output, of tensors of the same shapes.
            retain_graph: Keep the residuals, so that the pullback can be called again. With
                ``False``, each residual is freed as soon as it has been read.
            create_graph: Let outer transforms and plain autograd record the pullback, so that it
                can itself be differentiated. By default this follows grad mode.

        Raises:
            RuntimeError: ``cotangents`` has another structure than the output, or the residuals
                have been freed.
        """
        gradients = self._pull(cotangents, retain_graph, create_graph)
        # A backward that returns a saved tensor unchanged returns a wrapper of the ended level.
        alive = [_torch.alive(gradient) for gradient in gradients if gradient is not None]
        if self.watch is not None and self.watch.met:
            alive = sharding.pulled_once(alive)
        return tree.unflatten(self.inputs_spec, made_inside(alive))

    def gradients(self, cotangents: Any) -> list[torch.Tensor | None]:
        """The gradients by leaf, for the last call; ``None`` if the outputs don't depend on it."""
        found = self._pull(cotangents, retain_graph=False, fills=False)
        there = [_torch.alive(gradient) for gradient in found if gradient is not None]
        alive = iter(made_inside(there))
        return [None if gradient is None else next(alive) for gradient in found]

    def feed(self, cotangents: Any, receive: Callable[[int, torch.Tensor], None]) -> None:
        """Call ``receive(leaf, gradient)`` for each gradient as soon as it is complete.

        ``leaf`` is the number of the leaf. The gradients are not kept. For a leaf that the outputs
        do not depend on, there may be no call.
        """
        with ExitStack() as hooks:
            for leaf, tensor in enumerate(self.inputs):
                hooks.callback(tensor.register_hook(partial(_hand_over, receive, leaf)).remove)
            self._pull(cotangents, retain_graph=False, fills=False)

    def _pull(
        self,
        cotangents: Any,
        retain_graph: bool,
        create_graph: bool | None = None,
        fills: bool = True,
    ) -> Sequence[torch.Tensor | None]:
        """The gradients by leaf. Where there is none: ``None``, or zeros if ``fills``."""
        flat, spec = tree.flatten(cotangents)
        if spec != self._outputs_spec:
            raise RuntimeError(
                "Expected pytree structure of cotangents to be the same as pytree structure of "
                f"outputs to the function. cotangents: {spec}, primal output: {self._outputs_spec}"
            )
        if self._edges is None:
            raise RuntimeError(
                "vjp_fn: the residuals were freed, because an earlier call passed "
                "retain_graph=False. Pass it only in the last call"
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
                adding_remedies(),
                _outside_inference_mode(),
                compiler.without_compiled_autograd(),
                _torch.RequiresGradAllowed(),  # restores the flag, which the engine clears
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
                if fills and any(gradient is None for gradient in found):
                    found = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found)]
                return found
        except BaseException:
            finish_interrupted()
            raise


def _hand_over(receive: Callable[..., None], leaf: int, gradient: torch.Tensor) -> torch.Tensor:
    """A tensor hook that passes a gradient on, and gives the engine zeros of one element."""
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
    """Run ``func`` in a new grad level, which has ended when this function returns.

    Args:
        func: the function.
        args: its arguments, pytrees of any values.
        kwargs: its keyword arguments.
        argnums: which arguments are differentiated.
        has_aux: whether ``func`` returns a pair of output and aux.
        api: the name to use in errors.
        check_output: checks the output inside the level. By default all leaves must be tensors that
            can have derivatives.
        once: whether the pullback is called only once, and not under ``vmap``.

    Returns:
        The output, the aux or ``None``, and the pullback. The pullback returns the cotangent of the
        differentiated argument, or a tuple of cotangents if ``argnums`` is a tuple.
    """
    positions = validate.resolve_argnums(argnums, len(args), api)
    validate.check_inputs(args, positions, api)
    args, kwargs = taken_in(api, (args, kwargs))
    norms = norm_derivatives.around((args, kwargs), once=once)  # this counts only outer levels
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
                if value is not leaf:  # else it does not belong to this level
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
    """Detect derivatives that the function itself has dropped, and that would be zero."""
    if not all(map(_requires_grad, pullback.inputs)):
        raise RuntimeError(
            f"{api}: the function turned requires_grad off for an argument that is differentiated, "
            "by requires_grad_(False) or by assignment, so its gradient would be zeros. Leave "
            "requires_grad on, or differentiate with respect to fewer arguments (argnums=)."
        )
    # The engine clears this flag, and functx's own backward passes restore it. So if the flag is
    # cleared, the function has run a backward pass of torch.
    if not _torch.requires_grad_is_allowed() and pullback.is_zero():
        file, line, _ = line_of(where())
        message = (
            f"{api}: all derivatives are zeros. The output depends on none of the differentiated "
            "arguments, and the function has run a backward pass, whose results are constants "
            "without create_graph=True. Call torch.autograd.grad(..., create_graph=True), or "
            "functx.grad instead."
        )
        warnings.warn_explicit(message, RuntimeWarning, file, line)


_requires_grad = attrgetter("requires_grad")


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """A context that turns inference mode off, since autograd can't record in it."""
    grad, inferring = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if inferring else nullcontext(), torch.set_grad_enabled(grad):
        yield


@contextmanager
def _hooks_disabled() -> Iterator[None]:
    """A context in which saved-tensor hooks raise an error that says what to use instead."""
    message = _HOOKS_UNDER_PATCH if checkpoint_is_patched else _NO_HOOKS
    with adding_remedies(), disable_saved_tensors_hooks(message), _torch.RequiresGradAllowed():
        yield
