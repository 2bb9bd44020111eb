"""The file format: safetensors with a seal, and the state besides tensors as JSON."""
