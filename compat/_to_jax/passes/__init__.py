"""Passes over a traced graph: lift constants, remove writes, and apply the policies of regions."""
