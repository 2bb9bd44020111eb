"""Runs a script as if we were not there, and watches it and the processes that it starts."""
