"""Shared by the whole suite; warnings are errors through pyproject.toml."""

import os

# Before torch is imported anywhere: ranks and tests share few cores, and results must not depend on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing in the suite may ask a server for a model.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
