"""From a torch function to a functional ATen graph that says what autograd means."""
