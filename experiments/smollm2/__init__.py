"""Prompts, answers and records of real models: SmolLM2-135M-Instruct, Qwen2.5-Coder."""
