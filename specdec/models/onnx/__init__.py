"""Passes in ONNX Runtime on a CPU: graphs, sessions and draft heads."""
