"""Recompute in a ``torch.fx`` graph that contains a forward and its backward.

`remat` takes graphs from any source: ``make_fx`` of a training step, AOTAutograd, the joint export
of ``torch.export``, a graph trainer. The backward recomputes the forward values that it reads,
right before their first use, unless a region saves them. Nodes that nothing reads any more are
removed.

- In a step of several backward passes (accumulated gradients, several updates, a second derivative)
  each forward is recomputed in its own backward. The gradients and updated parameters that a later
  pass reads are kept.
- Operators that draw random numbers, write, or are registered as effectful run once, in their
  original order.
- A budget bounds the peak that ``functx.memory.peak`` measures: in bytes, or as a share.
- In AOTAutograd and the backends that build on it, `remat` can be part of a partition function. The
  partition must follow the marks of the nodes, as torch's ``default_partition`` does. A min-cut
  partition would choose again what to recompute::

      def partition_fn(joint, *args, **kwargs):
          return default_partition(functx.graph.remat(joint, budget=0.5), *args, **kwargs)
"""

from functx._compile import remat as remat

__all__ = ["remat"]
