"""Counterfactual replays of a bad step: pure procedures over whoever can replay it."""
