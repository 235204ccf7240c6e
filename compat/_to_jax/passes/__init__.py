"""Passes over a traced graph: no constants, no writes, and what policies save across regions."""
