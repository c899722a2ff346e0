"""Forward passes in ONNX Runtime on a CPU: graphs of models and draft heads, and their sessions."""
