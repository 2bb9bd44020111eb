"""That something is not finite: asked on the device, told once."""
