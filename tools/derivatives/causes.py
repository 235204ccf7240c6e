"""Why derivatives of torch and JAX differ, where they do."""

CAUSES = {}
NOT_SWEPT = {}
OF_JAX = {}
