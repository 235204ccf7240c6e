"""Private torch API of the compiler and of ``torch.utils.checkpoint``: part of `functx._torch`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils import checkpoint as _checkpoint

from functx import _torch
from functx._torch import default_generators

_eval_frame = torch._C._dynamo.eval_frame
F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(f: F) -> F:
    """``f``, which ``torch.compile`` does not look into: a graph break, and all of it in eager.

    As ``torch.compiler.disable``, which imports the compiler to say so (seconds), and wraps.
    """
    skip = _eval_frame._FrameAction.SKIP
    strategy = _eval_frame._FrameExecStrategy(skip, skip)  # this frame, and those it calls
    _eval_frame.set_code_exec_strategy(f.__code__, strategy)
    f._torchdynamo_disable = True  # type: ignore[attr-defined]
    f._torchdynamo_disable_msg = "functx runs this in eager"  # type: ignore[attr-defined]
    return f


def load() -> None:
    """Load the compiler, as torch does in the first call that it is to hide from the compiler.

    That leaves frames behind in reference cycles, with all that they refer to; not of anybody whose
    memory is being measured, if it happens here.
    """
    importlib.import_module("torch._dynamo")


_COMPILER = "torch._dynamo.eval_frame"
_stance: Any = None
_eager: list[Any] = []


def stay_eager() -> None:
    """Until `compile_again`, functions made by ``torch.compile`` run in eager.

    As under ``torch.compiler.set_stance("force_eager")``. Under a dispatch mode they would as well,
    but also ever after, and those made with ``fullgraph=True`` would raise.
    """
    global _stance
    compiler: Any = sys.modules.get(_COMPILER)
    if hasattr(compiler, "_stance"):
        _stance = compiler._stance
        if not _eager:
            _eager.append(compiler.DynamoStance("force_eager"))
        compiler._stance = _eager[0]


def compile_again() -> None:
    """End `stay_eager`."""
    global _stance
    if _stance is not None:
        compiler: Any = sys.modules[_COMPILER]
        compiler._stance, _stance = _stance, None


def graphs_compiled() -> int:
    """How many graphs were made so far: a call before which there were fewer has made one."""
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else compiler.counters["stats"]["unique_graphs"]


def hooks_guarded() -> Any:
    """A context in which a graph is made so that it is made again when hooks of modules change."""
    load()
    return torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)


def in_plain_graph() -> bool:
    """Whether ``torch.compile`` is tracing this, and no transform is active there."""
    # (It understands this question about the stack; `is None` it answers wrongly.)
    return torch.compiler.is_dynamo_compiling() and not isinstance(
        torch._C._functorch.peek_interpreter_stack(), torch._C._functorch.CInterpreter
    )


# --- torch.utils.checkpoint --------------------------------------------------------------------


# As torch made it, if nobody replaced it before functx was imported.
checkpoint_module = _checkpoint
public_torch_checkpoint = _checkpoint.checkpoint


def torch_checkpoint() -> Any:
    """Torch's own ``checkpoint``, under what hides it from the compiler."""
    function = inspect.unwrap(public_torch_checkpoint)
    code = getattr(function, "__code__", None)
    if getattr(function, "__globals__", None) is not vars(_checkpoint) or code is None:
        raise RuntimeError(
            f"functx: torch.utils.checkpoint.checkpoint had been replaced by {function!r} when "
            "functx was imported. Import functx before whatever replaces it."
        )
    return function


def of_the_compiler(function: Any) -> bool:
    """Whether a function given to ``checkpoint`` is a graph of ``torch.compile``."""
    return getattr(function, "__module__", None) == "torch._higher_order_ops.wrap" or isinstance(
        getattr(function, "__self__", None), torch.fx.Interpreter
    )


class Overrules(NamedTuple):
    """What torch's context managers around a call say of its options; ``None``: nothing."""

    early_stop: bool | None
    debug: bool | None


def checkpoint_overrules() -> Overrules:
    """What ``set_checkpoint_early_stop`` and ``set_checkpoint_debug_enabled`` say now."""
    return Overrules(
        _checkpoint._enable_checkpoint_early_stop, _checkpoint._checkpoint_debug_enabled
    )


# Since torch 2.13 a policy of its selective checkpoint is told what an operation returned.
OUTPUTS_KNOWN_TO_TORCH = hasattr(
    _checkpoint.SelectiveCheckpointContext(is_recompute=False), "op_output"
)


def selective_policy(context: Any) -> Any:
    """The policy behind a forward context of ``create_selective_checkpoint_contexts``, if so."""
    if isinstance(context, _checkpoint._CachingTorchDispatchMode):
        return context.policy_fn
    return None


def without_compiled_autograd() -> Any:
    """Backward passes as they are: transforms of torch.func have theirs so, too."""
    return torch._dynamo.compiled_autograd._disable()


def replays_numbers() -> bool:
    """Whether the compiler that is tracing this draws random numbers again in recomputation.

    Those that end in AOTAutograd do. Elsewhere (``backend="eager"``) the graph runs torch's
    checkpoint as it is, but told not to keep the states of generators.
    """
    symbolic_convert: Any = sys.modules["torch._dynamo.symbolic_convert"]
    common: Any = sys.modules.get("torch._dynamo.backends.common")
    found = symbolic_convert.InstructionTranslator.current_tx().output.compiler_fn
    while found is not None:
        name = getattr(found, "compiler_name", None) or getattr(found, "_compiler_name", None) or ""
        if name == "inductor" or name.startswith("aot_"):
            return True
        if common is not None and isinstance(found, common.AotAutograd):
            return True
        found = getattr(found, "_torchdynamo_orig_backend", getattr(found, "compiler_fn", None))
    return False


# It is asked while the compiler traces, as `torch.compiler.assume_constant_result` has it.
replays_numbers._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Numbers:
    """States of default generators, before a forward; and around its recomputation."""

    def __init__(self, inner: Any, of: _Numbers | None = None) -> None:
        self._inner = inner
        self._of = of
        self._after: Any = None
        self.states: Any = None

    def __enter__(self) -> Any:
        now = _states()
        if self._of is None:
            self.states = now
        else:
            self._after = now
            _set_states(self._of.states)
        return self._inner.__enter__()

    def __exit__(self, *exc: Any) -> Any:
        if self._of is not None:
            _set_states(self._after)
        return self._inner.__exit__(*exc)


def _states() -> list[Any]:
    return [generator.get_state() for _, generator in default_generators()]


def _set_states(states: list[Any]) -> None:
    for (_, generator), state in zip(default_generators(), states):
        generator.set_state(state)


def same_numbers(policy: Any = None) -> tuple[Any, Any]:
    """Contexts for torch's checkpoint in a graph: a policy, and the same random numbers again.

    Args:
        policy: of torch's selective checkpoint; ``None`` for that which keeps nothing.
    """
    if _torch.tracing():  # by AOTAutograd, which asks the policy that there is
        return _checkpoint.create_selective_checkpoint_contexts(policy or _recomputes)
    made = (nullcontext(), nullcontext())
    if policy is not None:
        made = _checkpoint.create_selective_checkpoint_contexts(policy)
    forward = _Numbers(made[0])
    return forward, _Numbers(made[1], forward)


def _recomputes(*_: Any, **__: Any) -> Any:
    return _checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
