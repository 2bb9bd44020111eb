"""The smallest thing that still goes bad: one operation, as few numbers as it takes, a script."""
