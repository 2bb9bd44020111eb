"""Before it happens: operations and losses that cannot blow up, and what to check in advance."""
