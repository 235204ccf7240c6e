"""Runs a functional graph on JAX arrays: operations, regions, custom Functions, scanned layers."""
