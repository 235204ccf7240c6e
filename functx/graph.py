"""Recompute in a graph of ``torch.fx`` that holds a forward and its backward.

`remat` takes graphs from anywhere: ``make_fx`` of a step, AOTAutograd, the joint export of
``torch.export``, a graph trainer. The backward recomputes what it reads of the forward, right
before the first use, unless a region saves it. Nodes that nothing reads any more are removed.
"""

from functx._compile import remat as remat

__all__ = ["remat"]
