"""Converts a model for ONNX Runtime GenAI: ``convert_ort.py MODEL FOLDER [SITE-PACKAGES...]``.

The runtime's own Python runs this script; it finds torch and transformers in SITE-PACKAGES.
"""

import runpy
import sys

model, folder, *sites = sys.argv[1:]
sys.path.extend(sites)
words = ["-i", model, "-o", folder, "-p", "fp32", "-e", "cpu", "-c", f"{folder}/cache"]
sys.argv = ["builder", *words]
runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
