"""Trace a torch function into an ATen graph that includes the meaning of autograd."""
