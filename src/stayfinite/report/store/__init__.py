"""The run directory: what happened in training, recorded once, shown in many ways."""
