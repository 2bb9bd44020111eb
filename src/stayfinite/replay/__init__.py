"""The step that went bad, run once more where it stands: the body of the running loop."""
