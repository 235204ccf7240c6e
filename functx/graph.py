"""Recompute in a graph of ``torch.fx`` that holds a forward and its backward.

`remat` takes graphs from anywhere: ``make_fx`` of a step, AOTAutograd, the joint export of
``torch.export``, a graph trainer. The backward recomputes what it reads of the forward, right
before the first use, unless a region saves it. Nodes that nothing reads any more are removed.

- In a step of several backward passes (accumulated gradients, several updates, a second derivative)
  each forward is recomputed in its own backward. The gradients and updated parameters that a later
  pass reads are kept.
- Operators that draw or write, or are registered to have an effect, run once, in their old order.
- A budget bounds the peak that ``functx.memory.peak`` measures: in bytes, or as a share.
- In AOTAutograd and the backends that build on it, `remat` can be part of a partition function. The
  cut must follow the marks of the nodes, as that of torch's ``default_partition`` does. A min-cut
  partition would choose again what to recompute::

      def partition_fn(joint, *args, **kwargs):
          return default_partition(functx.graph.remat(joint, budget=0.5), *args, **kwargs)
"""

from functx._compile import remat as remat

__all__ = ["remat"]
