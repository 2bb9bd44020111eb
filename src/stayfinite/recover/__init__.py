"""What now: which strategy comes next, and what each of them does."""
