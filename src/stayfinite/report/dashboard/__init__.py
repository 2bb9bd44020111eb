"""The live dashboard: a page on this machine that follows runs while they are written."""
