"""Telling people: a report in the terminal, as a page, in a run directory. No torch here."""
