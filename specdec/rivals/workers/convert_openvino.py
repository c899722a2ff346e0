"""Converts a model folder for OpenVINO: ``convert_openvino.py MODEL FOLDER``.

The converter's own Python runs this script.
"""

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig

main_export(
    sys.argv[1],
    output=sys.argv[2],
    task="text-generation-with-past",
    library_name="transformers",
    convert_tokenizer=False,
    ov_config=OVConfig(),  # without one, models of a billion parameters become int8
)
