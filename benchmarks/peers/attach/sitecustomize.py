"""Switches the peer named in the environment on, in each process that Python starts."""

import importlib
import os

if os.environ.get("NONFINITE_PEER"):
    importlib.import_module(os.environ["NONFINITE_PEER"]).attach()
    importlib.import_module("peers.notes").note(is_attached=True)
