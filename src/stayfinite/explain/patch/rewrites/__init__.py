"""Ways to change an expression so that it stays finite, one family per file."""
