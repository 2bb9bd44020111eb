"""Checkpoints of others, read without running any code of theirs."""
