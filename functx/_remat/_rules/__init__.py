"""What each transform does to a region; importing this registers every rule."""

from functx._remat._rules import eager, functionalize, grad, jvp, proxy, vmap

__all__ = ["eager", "functionalize", "grad", "jvp", "proxy", "vmap"]
