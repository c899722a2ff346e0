"""Converts a model folder for ONNX Runtime GenAI: MODEL FOLDER [SITE-PACKAGES...].

Run by the runtime's own Python; torch and transformers come from the further folders.
"""

import runpy
import sys

model, folder, *sites = sys.argv[1:]
sys.path.extend(sites)
words = ["-i", model, "-o", folder, "-p", "fp32", "-e", "cpu", "-c", f"{folder}/cache"]
sys.argv = ["builder", *words]
runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
