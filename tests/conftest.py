"""Tests import the seven files from the repository's root, wherever they are started.

Without a GPU, Triton's kernels run in its interpreter, where Triton is installed at all. The
environment says so before the first test imports sample.py.
"""

import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
