"""Transforms keep the signatures of the functions they take: checked by `make lint`."""

from typing import Any, assert_type

from torch import Tensor

import functx


def loss(w: Tensor, x: Tensor, power: int = 2) -> Tensor:
    return ((w @ x) ** power).sum()


def keep(w: Tensor, x: Tensor) -> None:
    assert_type(functx.grad(loss)(w, x, power=3), Any)
    assert_type(functx.grad_and_value(loss)(w, x, power=3), tuple[Any, Tensor])
    assert_type(functx.value_and_grad(loss, argnums=(0, 1))(w, x), tuple[Tensor, Any])
    assert_type(functx.jacrev(loss)(w, x), Any)
    assert_type(functx.jacfwd(loss, randomness="same")(w, x), Any)
    assert_type(functx.hessian(loss)(w, x), Any)
    assert_type(functx.vmap(loss, (None, 0), randomness="different")(w, x, power=2), Tensor)
    assert_type(functx.linearize(loss, w, x)[0], Tensor)
    assert_type(functx.remat(loss)(w, x, power=3), Tensor)
    assert_type(
        functx.remat(determinism_check="none", preserve_rng_state="all")(loss)(w, x), Tensor
    )
    assert_type(functx.jit(functx.vmap(functx.value_and_grad(loss)))(w, x), tuple[Tensor, Any])


def refuse(w: Tensor) -> None:
    functx.grad(loss)(w)  # type: ignore[call-arg]
    functx.vmap(loss)(w, "x")  # type: ignore[arg-type]
    functx.vmap(loss, randomness="some")  # type: ignore[arg-type]
    functx.grad(loss, argnums="w")  # type: ignore[arg-type]
    functx.remat(loss, determinism_check="all")  # type: ignore[call-overload]
