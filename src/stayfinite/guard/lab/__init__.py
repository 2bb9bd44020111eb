"""Experiments on a script: it is run to its bad step, and goes on from there in many ways."""
