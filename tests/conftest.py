"""Set up what all tests need.

The repository's root goes on the import path, so that tests run from any folder. Without a GPU,
sample.py's kernels run in Triton's interpreter. Triton reads TRITON_INTERPRET when a kernel is
defined, so the variable is set before the first import of sample.py.
"""

import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
