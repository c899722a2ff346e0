"""The command line composes a configuration with Hydra, checks it and passes plain dicts on."""

import os

# With threads of numpy's own a command could not be forked into its ranks; it computes in torch.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
